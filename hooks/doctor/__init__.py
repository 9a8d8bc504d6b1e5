"""`kvgraph doctor`: checks all that an engine here needs for advice, and names remedies."""

from .command import app

__all__ = ["app"]
