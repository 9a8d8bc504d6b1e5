"""What left the pools: a ring of records per engine, and what decided each eviction."""
