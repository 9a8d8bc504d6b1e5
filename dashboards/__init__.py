"""What people look at: the sidecar's HTTP surface, its metrics, and its page.

Reads one contract, ``source``, which the sidecar implements. The page's own code is in ``web``.
"""
