"""Traces in columns: which blocks were asked for, when, and what callers said.

Reads other formats, writes our own, and turns a trace into the events that an engine with our hook
would have sent.
"""
