"""Moves KV bytes: spill, load, splice to another position; in torch, C++ on CPUs, and CUDA.

``ops`` is the entry point: it checks arguments and takes the fastest back end that works. Needs
torch and numpy; CUDA kernels also need ``cuda-core`` and NVRTC (extra ``cuda``). ``cpu`` and
``cuda`` hold the sources that are compiled at first use.
"""
