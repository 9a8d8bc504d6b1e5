"""Closed loops, and requests by the clock, on vLLM's own scheduler above workers on paper."""
