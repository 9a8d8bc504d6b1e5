"""The sidecar's ends of the wire: who may connect, and what arrives and leaves in which order.

``subscriber`` and ``publisher`` serve engines with our hook, ``kv_event_source`` those without.
"""
