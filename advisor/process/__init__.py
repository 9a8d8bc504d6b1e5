"""Process-level services: ending with the parent, snapshots, keys, rate-limited logs, HTTP
serving.
"""
