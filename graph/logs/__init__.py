"""Bounded logs of evictions, requests, and why these missed: rings of columns in which new records
overwrite the oldest. Ingest calls ``history.History`` for each event.
"""
