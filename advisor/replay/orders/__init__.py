"""Eviction orders: decide which of the free blocks goes next.

``graph_order`` is a live sidecar's; the others are what it is compared with.
"""
