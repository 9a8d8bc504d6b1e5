"""The sidecar's ends of the wire: who may connect, what arrives, in which order, and what goes
out.

``subscriber`` and ``publisher`` serve engines with our hook, ``kv_event_source`` those without.
"""
