"""Makes machine code at first use, and keeps it.

CUDA sources go through NVRTC, C++ through the machine's own compiler; ``compiled`` is the cache
that both of them fill under a lock.
"""
