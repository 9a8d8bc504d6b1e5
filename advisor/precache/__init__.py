"""``kvgraph precache``: stable prefixes are computed before anybody asks, on any OpenAI-compatible
server.
"""
