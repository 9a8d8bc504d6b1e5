"""Traces in columns: who asked for which blocks, when, and what callers said.

Reads the formats of others, writes our own, and turns a trace into the events that an engine with
our hook would have sent.
"""
