"""The graph's data in columns: blocks, edges, names, and the logs that rankings read.

Nothing here decides anything. ``tables`` holds all of it, ``integrity`` states what must be true
of it at any time.
"""
