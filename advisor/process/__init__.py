"""What the sidecar needs as a process, independent of its task.

It ends with its parent, keeps the graph on disk, and lets no flood of bad input fill its log.
"""
