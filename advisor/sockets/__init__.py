"""The sidecar's sockets: who may connect, and in which order messages are applied.

Engines connect at ``front``; ``subscriber`` and ``publisher`` serve those with our hook,
``kv_events`` those without. ``kv_order`` puts the latter's batches in order and requests missing
ones again.
"""
