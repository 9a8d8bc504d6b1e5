"""The graph's data, without any decisions: columns of blocks, edges and sessions, and the indexes
over them. ``tables`` holds all of it; ``integrity`` states its invariants.
"""
