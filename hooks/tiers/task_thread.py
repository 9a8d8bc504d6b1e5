"""A thread for what must not hold up others."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final

_CLOSE_S: Final = 5.0  # that it is given to finish when the engine ends


class TaskThread:
    """Does one thing after the other.

    Args:
        name: The thread's.
    """

    def __init__(self, name: str) -> None:
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, task: Callable[[], None]) -> None:
        """Do ``task`` after what was put before; it reports its own failure."""
        self._tasks.put(task)

    @property
    def alive(self) -> bool:
        """Whether something is still under way, or may come."""
        return self._thread.is_alive()

    def close(self) -> bool:
        """Finish what was put; False if that takes too long."""
        self._tasks.put(None)
        self._thread.join(timeout=_CLOSE_S)
        return not self.alive

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            with contextlib.suppress(Exception):
                task()
