"""What a person looks at: the sidecar's HTTP surface and its metrics.

Reads one contract, ``source``, which the sidecar fulfils. Pages would stand in ``web``.
"""
