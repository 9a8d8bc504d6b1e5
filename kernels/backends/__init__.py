"""The same operations done four ways, with the same bits: torch, C++, CUDA, and CUDA emulated.

``reference`` is the truth that the others are compared with.
"""
