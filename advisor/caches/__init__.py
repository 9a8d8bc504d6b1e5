"""Caches of other processes that follow confidence: what they tell the sidecar, and its memory."""
