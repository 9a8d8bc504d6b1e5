"""Bounded logs of evictions, requests, and why they missed; rings of columns.

Ingest calls ``history.History`` at each event. A miss is judged when it happens, and again once its
step's evictions are reported. No log grows without bound: the oldest record makes room.
"""
