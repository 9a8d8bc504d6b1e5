"""The graph: KV blocks, how they relate, and the messages about them.

It imports none of the other packages, so that both processes can use it. An engine needs ``wire``,
``types`` and ``errors`` alone; tables, ranking and queries belong to the sidecar.
"""
