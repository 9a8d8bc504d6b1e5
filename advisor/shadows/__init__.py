"""Shadows of other policies and pool sizes beside the live pools, and an upper bound.

They see the engines' own requests (``graph.logs.heard.Heard``), of as many sessions as a bounded
share of a processor core can follow, and count what they would have found. Nothing waits for them,
and no advice depends on them: the policy's guard has shadows of its own.
"""
