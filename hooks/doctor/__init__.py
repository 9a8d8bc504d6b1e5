"""`kvgraph doctor`: checks what an engine on this machine needs to be advised, and names the
remedy.

``command`` checks vLLM, the plugin and the sockets, ``environment`` the variables, ``gpu_check``
the GPUs.
"""

from .command import app

__all__ = ["app"]
