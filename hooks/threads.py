"""Threads for work that must not delay others, their names, and warnings that are logged once."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Final


class Once:
    """Logs each kind of warning only the first time."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._said: set[str] = set()

    def warn(self, what: str, message: str, *args: object) -> None:
        """Log ``message`` unless there was a warning of ``what`` before."""
        if what not in self._said:
            self._said.add(what)
            self._logger.warning(message, *args)

    def has_said(self, what: str) -> bool:
        return what in self._said

    def again(self, what: str) -> None:
        """Allow the next warning of ``what`` to be logged again."""
        self._said.discard(what)


def shown(run: Callable[[], None]) -> Callable[[], None]:
    """Wrap ``run`` so that ``top -H`` shows its thread's name, up to 15 characters."""

    def call() -> None:
        path = Path(f"/proc/self/task/{threading.get_native_id()}/comm")
        with contextlib.suppress(OSError):
            path.write_text(threading.current_thread().name)
        run()

    return call


_CLOSE_S: Final = 5.0  # seconds to finish when the engine ends; chosen


# Not a ThreadPoolExecutor: the interpreter joins its threads when it exits, and one that hangs in a
# system call to a dead disk would keep the engine from ending.
class TaskThread:
    """Runs tasks one after the other on a daemon thread."""

    def __init__(self, name: str) -> None:
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=shown(self._run), name=name, daemon=True)
        self._thread.start()

    def put(self, task: Callable[[], None]) -> None:
        """Run ``task`` after earlier ones; it must handle its own errors."""
        self._tasks.put(task)

    @property
    def alive(self) -> bool:
        """Return whether a task is running, or may still come."""
        return self._thread.is_alive()

    def close(self) -> bool:
        """Finish the queued tasks; returns False if that takes too long."""
        self._tasks.put(None)
        self._thread.join(timeout=_CLOSE_S)
        return not self.alive

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            with contextlib.suppress(Exception):
                task()


def log_where_vllm_logs() -> None:
    """Give kvgraph's loggers vLLM's handlers, unless they have been configured already."""
    ours, theirs = logging.getLogger("kvgraph"), logging.getLogger("vllm")
    if ours.handlers or not theirs.handlers:
        return
    ours.handlers = list(theirs.handlers)
    ours.propagate = False
    if ours.level == logging.NOTSET:
        ours.setLevel(theirs.level or logging.INFO)


def warn_read_no_more(logger: logging.Logger, what: str, error: Exception) -> None:
    """Warn that something is no longer read, without the error's text, which may quote a prompt."""
    logger.warning(
        "kvgraph: %s is read no more (%s); callers may say it",
        what,
        type(error).__name__,
        exc_info=logger.isEnabledFor(logging.DEBUG),
    )
