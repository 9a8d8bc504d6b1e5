"""Decides in which order an engine should evict its blocks, and which copies it should have: a
policy (``policy``, ``formulas``) scores blocks from a ``View``, ``order`` makes a ranking of the
scores under ``rules``, ``fronts`` copies what is ranked under the graph's lock, ``copies`` says
which blocks deserve a copy.
"""
