"""Applies a ranking to vLLM's free queue, between its allocations.

``arranger`` decides when. ``window`` moves the next victims to the head, behind the empty blocks
that stand there (``core_window`` does the same with the compiled core); ``protection`` keeps
protected blocks away from the head.
"""
