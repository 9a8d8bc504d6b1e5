"""The graph's data: columns of blocks, edges and sessions, and the indexes over them.

Nothing here decides anything. ``tables`` holds all of it, ``held_rows`` lists what each engine
holds, and ``integrity`` states what is true of it at any time.
"""
