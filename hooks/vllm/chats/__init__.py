"""Chats on their way through the API process: whose messages they are, which layers these have, and
what clients say of them.
"""
