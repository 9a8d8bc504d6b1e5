"""What people look at: the sidecar's HTTP surface, its metrics, and its page.

The sidecar gives its state as ``source`` and the routers of its views. The page is TypeScript in
``web``, built into ``page``, which the package carries.
"""
