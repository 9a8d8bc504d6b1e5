"""Waiting for what another thread or process does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

PATIENCE_S: Final = 120.0
"""For what takes a moment: minutes, since other tests and engines run beside."""

_LOOK_S: Final = 0.01  # from one look to the next


def until(
    condition: Callable[[], object], what: str = "it did not happen", timeout_s: float = PATIENCE_S
) -> None:
    """Return as soon as a condition holds; fail with ``what`` after ``timeout_s``, in which a pause
    of this process, as on a machine that sleeps, does not count.
    """
    for _ in range(round(timeout_s / _LOOK_S)):
        if condition():
            return
        time.sleep(_LOOK_S)
    raise AssertionError(what)


async def soon(
    condition: Callable[[], object], what: str = "it did not happen", timeout_s: float = PATIENCE_S
) -> None:
    """Do what ``until`` does in a coroutine, where other tasks go on meanwhile."""
    for _ in range(round(timeout_s / _LOOK_S)):
        if condition():
            return
        await asyncio.sleep(_LOOK_S)
    raise AssertionError(what)
