"""Bounded logs of evictions, requests, and why they missed: rings of columns, in which the oldest
record makes room. Ingest calls ``history.History`` at each event.
"""
