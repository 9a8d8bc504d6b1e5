"""``kvgraph route``: one OpenAI-compatible address before several engines.

A request is read (``turns``), sent to the engine that the router chose (``upstream``), and its
answer is passed on as it comes. Whatever engine answered nothing yet can be replaced by another.
"""
