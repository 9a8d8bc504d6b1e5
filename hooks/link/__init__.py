"""The engine's end of the wire, part by part; ``client.py`` puts them together.

``outbox`` holds events until they are sent, ``mailbox`` holds the sidecar's latest advice, ``link``
is the socket between them, and knows whether a sidecar answers. ``held_ranking`` is a ranking made
ready, ``late_events`` are made when they are sent, and ``tips`` cut chains short.
"""
