"""``kvgraph precache``: computes stable prefixes ahead of requests, on any OpenAI-compatible
server.
"""
