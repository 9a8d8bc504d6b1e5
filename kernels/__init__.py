"""Moving KV bytes: spill, warm, splice to a new position; torch, native CPU and CUDA back ends.

Needs torch and numpy; CUDA kernels need ``cuda-core`` and NVRTC as well (extra ``cuda``).
"""
