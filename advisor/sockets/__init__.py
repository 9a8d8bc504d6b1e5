"""The sidecar's sockets: engines connect at ``front``; ``subscriber`` and ``publisher`` serve those
with our hook, ``kv_events`` and ``kv_order`` those without.
"""
