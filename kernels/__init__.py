"""Moves KV bytes: spill, load, splice to another position; in torch, C++ on CPUs (``cpu``), and
CUDA (``cuda``), compiled at first use. ``ops`` checks arguments and takes the fastest back end that
works.
"""
