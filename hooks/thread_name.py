"""Our threads bear their names for the system too, as ``top -H`` and ``/proc`` show them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path


def shown(run: Callable[[], None]) -> Callable[[], None]:
    """``run``, for a thread whose name Linux is told first; it keeps 15 characters of it."""

    def call() -> None:
        path = Path(f"/proc/self/task/{threading.get_native_id()}/comm")
        with contextlib.suppress(OSError):
            path.write_text(threading.current_thread().name)
        run()

    return call
