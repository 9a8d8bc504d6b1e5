"""Memories: items of an external store that segments name, and who recalls them."""
