"""Decides in which order an engine should evict its blocks, and which copies it should have.

A policy scores blocks from a ``View`` (``policy`` says how, ``formulas`` has the two simple ones),
and ``order`` makes a ranking of the scores: rules bind every policy (``rules``), chains stay whole,
and an engine keeps its own order where that finds more. ``fronts`` copies what is ranked under the
graph's lock. ``copies`` says which blocks deserve a copy, which copies are given up first, and
which return.
"""
