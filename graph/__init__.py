"""The graph: KV blocks, how they relate, and the messages about them. It imports none of the other
packages; an engine needs ``wire``, ``types`` and ``errors`` alone, the rest belongs to the
sidecar.
"""
