"""Back ends of the same operations with the same bits: torch, C++, CUDA, and emulated CUDA.

``base`` is their contract, ``choice`` selects one, and ``reference`` defines the results.
"""
