"""Benchmarks and the demo: every figure that the README claims, by a command. One folder a subject;
what several share is in ``serving``, ``sidecars``, ``paper`` and ``recorded``.
"""
