"""``kvgraph precache``: computes stable prefixes ahead, on any OpenAI-compatible server."""
