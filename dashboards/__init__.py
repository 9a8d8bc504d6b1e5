"""What people look at: the sidecar's HTTP surface, its metrics, and its page.

Reads one contract, ``source``, which the sidecar fulfils. The page is TypeScript in ``web``, built
into ``page``, which is what the package carries.
"""
