"""``kvgraph bench tiers``: agents that wait for tools, with and without host memory."""
