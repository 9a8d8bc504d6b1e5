"""The graph's logs as the page shows them: requests, their misses, evictions, one block's past."""
