"""The shared store: KV blocks that any engine of a fleet may load; below an engine's own tiers.

Nothing here knows vLLM or the tiers. A ``SharedStore`` (a directory, or Mooncake's) keeps bytes by
key; ``SealedRecords`` keeps a worker's records in it, checks them when they are read, and fails at
once while the store does not work (``StoreBreaker``).
"""
