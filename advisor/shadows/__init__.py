"""What else could rank: shadows of other policies and sizes beside the live pools, and a ceiling.

They hear of the engines' own requests (``graph.logs.history.Heard``), of as many sessions as a
bounded share of a processor core can follow, and count what they would have found. Nobody waits
for them, and no advice depends on them: the policy's guard has shadows of its own.
"""
