"""The graph's data, which decides nothing: columns of blocks, edges and sessions, and the indexes
over them. ``tables`` holds all of it; ``integrity`` states what is true of it at any time.
"""
