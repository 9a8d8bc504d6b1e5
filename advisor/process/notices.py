"""Log lines that a flood of bad input cannot multiply."""

from __future__ import annotations

import logging
from collections.abc import Callable


class Notices:
    """Logs a kind of trouble at most once per ``every_s`` seconds, with the number of lines left
    out.

    Kinds are our own words, never input, so that their number is bounded.
    """

    def __init__(
        self, logger: logging.Logger, clock: Callable[[], float], every_s: float = 10.0
    ) -> None:
        self._logger = logger
        self._clock = clock
        self._every_s = every_s
        self._last: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def warn(self, kind: str, message: str, *args: object) -> None:
        """Log ``message % args``, unless one of its kind was logged just now."""
        now = self._clock()
        if now - self._last.get(kind, float("-inf")) < self._every_s:
            self._left_out[kind] = self._left_out.get(kind, 0) + 1
            return
        self._last[kind] = now
        left_out = self._left_out.pop(kind, 0)
        suffix = f" (and {left_out} more like it)" if left_out else ""
        self._logger.warning(message + "%s", *args, suffix)

    def once(self, kind: str, message: str, *args: object) -> None:
        """Log ``message % args`` the first time only."""
        if kind not in self._last:
            self._last[kind] = self._clock()
            self._logger.warning(message, *args)
