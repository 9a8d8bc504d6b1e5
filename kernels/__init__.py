"""Moves KV bytes: spill, load, and splice to another position; in torch, C++ on CPUs (``cpu``), and
CUDA (``cuda``), compiled at first use. ``ops`` checks arguments and uses the fastest back end that
works.
"""
