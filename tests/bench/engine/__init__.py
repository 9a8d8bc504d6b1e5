"""``kvgraph bench engine``: what an engine that needs no help pays for the graph, in CPU time."""
