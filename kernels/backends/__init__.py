"""The same operations done four ways, with the same bits: torch, C++, CUDA, and CUDA emulated.

``base`` says what each must offer, ``choice`` says which one is taken, ``reference`` is the truth
that the others are compared with.
"""
