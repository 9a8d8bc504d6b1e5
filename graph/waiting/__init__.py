"""Decides which requests wait for room, and which of them may start: one rule for engine and lab.

The rule knows neither: ``hooks.vllm.holding`` asks it in an engine's steps, and the lab's closed
loop as its clock runs.
"""
