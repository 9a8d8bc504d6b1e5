"""``Keyboard``: keys as they are pressed, where there is a terminal to press them at."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from typing import Any, Final, Self

HUNG_UP: Final = "\x04"
"""Stands for a terminal that is gone, as Ctrl-D does for its end."""


class Keyboard:
    """Reads single keys from the standard input, unechoed; without a terminal there are none.

    The terminal is as it was before when the ``with`` block is left.
    """

    def __init__(self) -> None:
        self._number = sys.stdin.fileno() if sys.stdin.isatty() else None
        self._before: list[Any] = []

    def __enter__(self) -> Self:
        if self._number is not None:
            self._before = termios.tcgetattr(self._number)
            tty.setcbreak(self._number)
        return self

    def __exit__(self, *_: object) -> None:
        if self._number is not None:
            termios.tcsetattr(self._number, termios.TCSADRAIN, self._before)

    def pressed(self, within_s: float) -> str:
        """The key that is pressed within so many seconds; empty if none is."""
        if self._number is None:
            time.sleep(within_s)
            return ""
        if not select.select([self._number], [], [], within_s)[0]:
            return ""
        try:
            return os.read(self._number, 1).decode("latin-1") or HUNG_UP
        except OSError:
            return HUNG_UP
