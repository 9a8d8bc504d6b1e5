"""``kvgraph bench agents``: recorded coding agents on a real vLLM, arm by arm."""
