"""Waiting for what another thread or process does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

PATIENCE_S: Final = 120.0
"""For what takes a moment: minutes, since other tests and engines run beside."""


def until(
    condition: Callable[[], object], what: str = "it did not happen", timeout_s: float = PATIENCE_S
) -> None:
    """Return as soon as a condition holds; fail with ``what`` after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


async def soon(
    condition: Callable[[], object], what: str = "it did not happen", timeout_s: float = PATIENCE_S
) -> None:
    """Do what ``until`` does in a coroutine, where other tasks go on meanwhile."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.01)
