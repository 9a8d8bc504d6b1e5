"""Decides in which order an engine should evict its blocks, and which copies it should have.

A ranking is computed from a ``view``. A policy scores (``policy`` says how, ``formulas`` has the
two simple ones), and ``scoring`` makes a ranking of scores: the rules bind every policy (``rules``,
``protection``; a person sets them in a ``profile``), and chains stay whole. ``ruler`` leaves an
engine its own order where that finds more; ``places`` says where a block stands. ``copy_worth``
says which blocks deserve a copy, ``copy_order`` which copies are given up first, ``candidates``
which return.
"""
