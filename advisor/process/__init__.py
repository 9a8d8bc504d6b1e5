"""What our servers need as processes, independent of their tasks.

The sidecar ends with its parent, keeps the graph on disk, and lets no flood of bad input fill its
log; what stands before engines listens on loopback unless more is permitted.
"""
