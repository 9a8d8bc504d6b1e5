"""The graph's data: blocks, edges, and the logs that rankings read; made of ``graph.columns``.

Nothing here decides anything. ``tables`` holds all of it, ``all_edges`` answers for edges of every
type, ``integrity`` states what is true of it at any time.
"""
