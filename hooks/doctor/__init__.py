"""`kvgraph doctor`: checks everything that an engine on this machine needs for advice, and names
remedies.
"""

from .command import app

__all__ = ["app"]
