"""``kvgraph bench faults``: what holds when things go wrong."""
