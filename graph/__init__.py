"""The graph: what a KV block is, how blocks relate, and what crosses the wire.

Imports nothing of ours, so both processes can have it. An engine needs ``messages``, ``ipc``,
``types`` and ``errors`` alone; the tables, the ranking and the queries are the sidecar's.
"""
