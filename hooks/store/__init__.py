"""The shared store: KV blocks that any engine of a fleet may load; below an engine's own tiers. A
``SharedStore`` (a directory, or Mooncake's) keeps bytes by key, ``SealedRecords`` a worker's
records in it, and ``StoreBreaker`` fails at once while it does not work.
"""
