"""Bounded logs of what happened: evictions, requests, why they missed; rings of columns.

Ingest feeds ``history.History`` at every point of interest; a miss is judged when it happens, and
again when it is heard what its step evicted. ``queries`` read it. Nothing here grows
without end: the oldest record makes room.
"""
