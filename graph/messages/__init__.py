"""The messages between an engine and the sidecar, and their form on the wire.

Events go up (``events``), advice comes down (``advice``), ``wire`` makes frames of both, and
``kv_events`` reads vLLM's own publisher. Whatever is malformed is refused here, with a reason.
"""
