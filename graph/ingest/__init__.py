"""Writes to the tables: applies what engines tell, run by run, as vectors.

``ingest`` hands each kind of event to the module that knows it: chains, turns, copies, layers,
held requests, edges that are learned.
"""
