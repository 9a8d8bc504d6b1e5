"""Eviction policies that learn, and the guard that keeps each at least as good as LRU. A new policy
is entered in ``registry``; their common protocol is ``graph.ranking.policy``.
"""
