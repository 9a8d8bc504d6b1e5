"""``kvgraph bench fleet``: what a fleet of engines finds together, and what its router costs."""
