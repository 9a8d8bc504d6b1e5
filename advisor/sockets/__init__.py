"""The sidecar's ends of the wire: who may connect, and what arrives and leaves in which order.

``front`` is where engines connect; ``subscriber`` and ``publisher`` serve those with our hook,
``kv_event_source`` those without: what it hears is brought in order by ``kv_order``, and asked for
again by ``kv_replay``.
"""
