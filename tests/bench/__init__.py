"""Benchmarks and the demo: every figure that the README claims, by a command."""
