"""Warnings that are logged once, however often their cause comes back."""

from __future__ import annotations

import logging


class Once:
    """Logs each kind of warning the first time only.

    Args:
        logger: Where the warnings go.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._said: set[str] = set()

    def warn(self, what: str, message: str, *args: object) -> None:
        """Log ``message`` unless there was a warning of ``what`` before."""
        if what not in self._said:
            self._said.add(what)
            self._logger.warning(message, *args)

    def again(self, what: str) -> None:
        """Let the next warning of ``what`` be logged again."""
        self._said.discard(what)
