"""The shared store: KV blocks that any engine of a fleet may load; below an engine's own tiers.

Nothing here knows vLLM or the tiers. A store (``SharedStore``: a directory, Mooncake's) keeps bytes
by key; ``SealedRecords`` makes a worker's records of it, which are checked when they are read and
refused at once while the store is not well (``StoreBreaker``).
"""
