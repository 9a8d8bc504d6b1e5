"""Sentences about misses, waits, scores and times, as people read them."""
