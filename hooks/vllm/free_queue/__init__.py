"""Applies a ranking to vLLM's free queue, between its allocations: ``arranger`` decides when,
``window`` (or ``core_window``) moves the next victims to the head, ``protection`` keeps protected
blocks away from it.
"""
