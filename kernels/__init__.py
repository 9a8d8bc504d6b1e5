"""Moves KV bytes: spill, load, splice to another position; torch, native CPU and CUDA back ends.

``ops`` is the face: it checks arguments and takes the fastest back end that works. Needs torch and
numpy; CUDA kernels need ``cuda-core`` and NVRTC as well (extra ``cuda``). ``cpu`` and ``cuda``
hold the sources that are compiled at first use.
"""
