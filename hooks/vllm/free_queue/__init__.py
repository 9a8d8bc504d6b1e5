"""Applies a ranking to vLLM's free queue, between its allocations.

``arranger`` lays the next victims at the head, ``head_guard`` keeps protected blocks away from it,
``queue_scan`` looks at what stands next a bounded stretch at a time.
"""
