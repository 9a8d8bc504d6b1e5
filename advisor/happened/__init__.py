"""What happened at engines: requests, evictions and blocks' lives, of a sidecar or a recording.

Exports and comparisons read this and do not care where it came from.
"""
