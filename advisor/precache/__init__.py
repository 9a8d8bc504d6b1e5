"""`kvgraph precache`: has stable prefixes computed before they are asked for, on any
OpenAI-compatible server."""
