"""A thread for work that must not delay others."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final

from ...thread_name import shown

_CLOSE_S: Final = 5.0  # seconds to finish when the engine ends; chosen


class TaskThread:
    """Runs tasks one after the other.

    Args:
        name: The thread's name.
    """

    def __init__(self, name: str) -> None:
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=shown(self._run), name=name, daemon=True)
        self._thread.start()

    def put(self, task: Callable[[], None]) -> None:
        """Run ``task`` after those that were put before; it reports its own failure."""
        self._tasks.put(task)

    @property
    def alive(self) -> bool:
        """Whether a task is under way, or may still come."""
        return self._thread.is_alive()

    def close(self) -> bool:
        """Finish the tasks that were put; False if that takes too long."""
        self._tasks.put(None)
        self._thread.join(timeout=_CLOSE_S)
        return not self.alive

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            with contextlib.suppress(Exception):
                task()
