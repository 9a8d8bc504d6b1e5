"""Eviction policies that learn, and the guard that keeps each of them from being worse than LRU.

A new one is entered in ``registry``; what all of them share is ``graph.ranking.policy``.
"""
