"""Back ends of the same operations with the same bits: torch, C++ and CUDA. ``base`` is their
contract, ``reference`` defines the results, and ``ops`` chooses one.
"""
