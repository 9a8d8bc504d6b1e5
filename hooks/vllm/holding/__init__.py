"""Admission in the engine: holds new sessions while those that are live leave no room for them.

The sidecar's advice says how much room there is, the rule in ``graph.waiting`` who may start; here
vLLM's queue of waiting requests is made to follow.
"""
