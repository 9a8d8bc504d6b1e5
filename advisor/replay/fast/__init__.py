"""Hit rates without simulated time: LRU, libcachesim's algorithms, and what nobody can beat."""
