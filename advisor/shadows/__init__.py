"""Shadows of other policies and pool sizes beside the live pools, and an upper bound.

They see the engines' own requests (``graph.logs.history.ReplayedWalk``), and count what they
would have found. If that takes more than a share of a processor core, they rank less often, down to
once in 64 seconds, and then follow fewer sessions, down to one of 64: they do no less than that.
Nothing waits for them, and no advice depends on them: the policy's guard has shadows of its own.
"""
