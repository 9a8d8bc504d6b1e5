"""Applies a ranking to vLLM's free queue, between its allocations.

``arranger`` decides when. ``window`` moves the next victims to the head, behind the empty blocks
that ``blanks`` counts there; ``head_guard`` keeps protected blocks (``protected_keys``) away.
``queue_scan`` looks through the queue's head for the spiller, a bounded stretch per step.
"""
