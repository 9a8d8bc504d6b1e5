"""What happened and would be forgotten: evictions, requests, why they missed; rings of columns.

``history.History`` is fed by ingest, a line at each place, and judges a miss once, when it happens.
``queries`` read it. Nothing here grows without end: the oldest record makes room.
"""
