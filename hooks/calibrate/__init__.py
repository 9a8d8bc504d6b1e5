"""``kvgraph calibrate MODEL``: measures how far a model's keys and values may be moved."""

from .command import app

__all__ = ["app"]
