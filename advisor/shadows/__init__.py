"""Simulations of other policies and pool sizes beside the live pools, and an upper bound. If they
take more than a share of a core, they rank less often, down to once in 64 seconds, and then follow
fewer sessions, down to one of 64. No advice depends on them: the policy's guard has its own.
"""
