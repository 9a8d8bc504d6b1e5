"""Gives our threads their names in the system too, for ``top -H`` and ``/proc``."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path


def shown(run: Callable[[], None]) -> Callable[[], None]:
    """``run``, for a thread whose name is set in Linux first; Linux keeps 15 characters."""

    def call() -> None:
        path = Path(f"/proc/self/task/{threading.get_native_id()}/comm")
        with contextlib.suppress(OSError):
            path.write_text(threading.current_thread().name)
        run()

    return call
