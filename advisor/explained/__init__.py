"""``kvgraph explain``: asks what the graph believes, and prints it."""
