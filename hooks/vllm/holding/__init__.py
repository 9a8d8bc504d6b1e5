"""Holds new sessions back while the live ones leave no room for them.

The sidecar's advice says how much room there is, and ``graph.admission`` which request may start.
``holding`` applies that rule, ``arrivals`` recognises live sessions, and ``queue`` keeps held
requests beside vLLM's waiting queue.
"""
