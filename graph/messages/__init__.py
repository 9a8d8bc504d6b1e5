"""What an engine and the sidecar tell each other, and how it looks on the wire.

Events go up (``events``), advice comes down (``advice``), ``wire`` makes frames of both, and
``kv_events`` reads vLLM's own publisher. Whatever is malformed is refused here, with a reason.
"""
