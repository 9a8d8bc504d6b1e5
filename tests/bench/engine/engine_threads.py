"""CPU time of an engine core, thread by thread, from ``/proc``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from ..errors import ServerError

_CORE: Final = "EngineCore"  # in the name that vLLM gives the process
_OURS: Final = "kvgraph"  # how the names of our threads begin


class EngineThreads:
    """What an engine core computes itself, and what kvgraph does beside it in the same processes.

    The core schedules; on most engines the model runs in processes of its own, whose OpenMP workers
    are not looked at. A sidecar's threads are not either: none of them bears our name.

    Args:
        processes: Of a server and all that descend from it.

    Raises:
        ServerError: None of them is an engine core, or several are.
    """

    def __init__(self, processes: Iterable[int]) -> None:
        self._processes = sorted(processes)
        cores = [pid for pid in self._processes if _CORE in _title(pid)]
        if len(cores) != 1:
            raise ServerError(f"{len(cores)} processes of this server are an engine core, not one")
        self.core = cores[0]

    def cpu_s(self) -> float:
        """CPU seconds so far of the core's main thread and of ours.

        What a thread that ended has used is not in it; ours live as long as the engine.
        """
        return sum(self.by_thread().values())

    def by_thread(self) -> dict[str, float]:
        """The same by the threads' names; the main one's is ``main``."""
        found: dict[str, float] = {}
        for task in self._tasks():
            name = "main" if task.name == str(self.core) else _read(task / "comm").strip()
            if name == "main" or name.startswith(_OURS):
                found[name] = found.get(name, 0.0) + _cpu_s(task)
        return found

    def _tasks(self) -> Iterator[Path]:
        for process in self._processes:
            with contextlib.suppress(OSError):  # a process may end meanwhile
                yield from Path(f"/proc/{process}/task").iterdir()


def _cpu_s(task: Path) -> float:
    """Seconds that a thread was on a CPU: in nanoseconds there, where ``stat`` counts in hundredths
    of a second."""
    words = _read(task / "schedstat").split()
    return int(words[0]) / 1e9 if words else 0.0


def _title(process: int) -> str:
    return _read(Path(f"/proc/{process}/cmdline")).replace("\0", " ")


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace")
    return ""
