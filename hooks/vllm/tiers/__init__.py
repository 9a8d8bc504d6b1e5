"""Moves blocks between vLLM's pool, host memory, disk and the shared store."""
