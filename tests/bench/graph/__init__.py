"""``kvgraph bench graph``: what ranking, ingest and memory of the graph cost."""
