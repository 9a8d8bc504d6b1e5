"""Shadows of other policies and pool sizes beside the live pools, and an upper bound. If they take
more than a share of a core, they rank less often, down to once in 17 minutes. No advice depends on
them: the policy's guard has its own.
"""
