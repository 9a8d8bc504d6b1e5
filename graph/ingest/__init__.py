"""Applies engine events to the tables, run by run, as vector operations. ``ingest`` passes each
kind of event to its module: chains, turns, copies, layers, held requests, learned edges.
"""
