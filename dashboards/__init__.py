"""What people see: the sidecar's HTTP surface, its metrics, and its page (TypeScript in ``web``,
built into ``page``).
"""
