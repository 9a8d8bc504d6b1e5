"""``kvgraph doctor``: asks what stands between this machine and an advised engine, and judges it.

``command`` asks of vLLM, the plugin and the sockets, ``environment`` of the variables,
``gpu_check`` of the GPU.
"""

from .command import app

__all__ = ["app"]
