"""Ahead of a request's turn: who waits in vLLM's queue, and which copies each lacks; and ahead of
blocks' evictions: how many of them should have copies (``copy_lead``), and what a load that is
about to take them would overwrite (``load_victims``).

``waiting_line`` keeps the queue's order, and ``lacking_copies`` looks up what the pool lacks of the
next one's prompt. What is found is loaded by the prefetcher, in ``transfers``.
"""
