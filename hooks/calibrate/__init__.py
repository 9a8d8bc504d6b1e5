"""``kvgraph calibrate MODEL``: measures how far a model's keys and values may move.

``trials`` measures spliced text against computing it again and judges the result; ``command`` is
the command, and keeps the result where engines look for it.
"""

from .command import app

__all__ = ["app"]
