"""Writes to the tables: applies what engines report, run by run, as vectors.

``ingest`` hands each kind of event to the module for it: chains, turns, copies, layers, held
requests, learned edges.
"""
