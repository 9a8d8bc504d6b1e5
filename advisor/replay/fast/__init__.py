"""Hit rates without simulated time: LRU, libcachesim's algorithms, and upper bounds."""
