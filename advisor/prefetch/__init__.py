"""What engines should bring back before a request asks, and whether that can wait for a round.

The graph says which copies (``graph.ranking.candidates``); here it is said when, and to whom.
"""
