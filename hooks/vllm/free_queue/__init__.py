"""Applies a ranking to vLLM's free queue, between its allocations.

``arranger`` moves the next victims to the head, ``head_guard`` keeps protected blocks away from it,
``queue_scan`` looks through the queue's head, a bounded stretch per step.
"""
