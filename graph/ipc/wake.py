"""Wakes a loop that sleeps in poll, from another thread or a signal handler."""

from __future__ import annotations

import contextlib
import os


class Wake:
    """A pipe to itself; ``fd`` is readable while a wake-up is due."""

    def __init__(self) -> None:
        self.fd, self._writer = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._writer, False)

    def set(self) -> None:
        """Wake the loop; several calls before it looks count as one."""
        with contextlib.suppress(OSError):  # full: it is due anyway; closed: nobody sleeps
            os.write(self._writer, b"!")

    def clear(self) -> None:
        """Take all wake-ups that are due."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 65536)

    def close(self) -> None:
        """Close the descriptors; a later ``set`` does nothing, whoever has these numbers next."""
        reader, writer, self.fd, self._writer = self.fd, self._writer, -1, -1
        os.close(reader)
        os.close(writer)
