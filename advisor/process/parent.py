"""Ends the sidecar with the engine that started it."""

from __future__ import annotations

import contextlib
import os

from ...graph.ipc.runtime import is_alive


class ParentWatch:
    """Notices that process ``pid`` is gone, at once if the kernel has pidfds.

    Attributes:
        fd: Becomes readable when the process ends; None without pidfds.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.fd: int | None = None
        self._gone = not is_alive(pid)
        with contextlib.suppress(AttributeError, OSError):  # no pidfds: ``is_gone`` asks each time
            self.fd = os.pidfd_open(pid)

    def is_gone(self, readable: bool = False) -> bool:
        """Whether the process has ended; ``readable``: ``fd`` was seen to be."""
        self._gone = self._gone or readable or (self.fd is None and not is_alive(self._pid))
        return self._gone

    def close(self) -> None:
        """Give the descriptor back."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
