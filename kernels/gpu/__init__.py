"""GPU-only code: kernel calls and launches, copy engines, streams, and measuring the fastest
method.
"""
