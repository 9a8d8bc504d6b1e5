"""Eviction policies that learn; what they share with the classic one is ``graph.policy``."""
