"""The shared store, below an engine's own tiers: KV blocks that any engine of a fleet may load. A
``SharedStore`` (a directory, or Mooncake's) keeps bytes by key, ``SealedRecords`` are one worker's
records in it, and ``StoreBreaker`` makes calls fail at once while it does not work.
"""
