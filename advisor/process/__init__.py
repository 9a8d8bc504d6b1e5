"""What the sidecar needs as a process, whatever it does.

It ends with its parent, keeps the graph on disk, and lets no flood of bad input fill its log.
"""
