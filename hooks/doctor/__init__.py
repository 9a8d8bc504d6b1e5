"""`kvgraph doctor`: checks what an engine on this machine needs to be advised, and names the
remedy.
"""

from .command import app

__all__ = ["app"]
