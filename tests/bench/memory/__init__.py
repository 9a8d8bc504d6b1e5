"""Chats beyond their budget, through ``kvgraph memory``: what comes back, and what it is worth."""
