"""An executor whose engine core notes its own times; see ``engine``."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any, Final

from vllm.v1.executor.multiproc_executor import MultiprocExecutor

_LONGEST_MS: Final = 2  # chosen: a step of a small model on a CPU takes tens


class SleepingExecutor(MultiprocExecutor):  # type: ignore[misc]
    def _init_executor(self) -> None:
        super()._init_executor()
        for queue in self.response_mqs:
            sleep_briefly(queue._spin_condition)


def sleep_briefly(condition: Any) -> None:
    """Let readers sleep until they are woken, or for a moment, before they look again."""
    wait = condition.wait
    condition.busy_loop_s = 0.0
    condition.wait = lambda timeout_ms=None: wait(_LONGEST_MS)


OWN_TIMES: Final = "KVGRAPH_BENCH_OWN_TIMES"
"""The variable that names the file in which the engine core keeps its profile."""

_EVERY_S: Final = 1e-3  # of the process's CPU time; chosen
_LOOP: Final = "run_busy_loop"  # what vLLM's engine core calls what it does once it is up
_KEPT_EVERY: Final = 500  # interruptions; chosen: half a busy second


class OwnTimes:
    """Counts the main thread's CPU seconds, by function and by whether ours called it or is it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seconds: defaultdict[tuple[str, str, bool], float] = defaultdict(float)
        self._used = 0.0
        self._interruptions = 0

    def start(self) -> None:
        self._used = time.thread_time()
        signal.signal(signal.SIGPROF, self._interrupted)
        signal.setitimer(signal.ITIMER_PROF, _EVERY_S, _EVERY_S)

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        used = time.thread_time()
        seconds, self._used = used - self._used, used
        if frame is None or (modules := _modules_to_loop(frame)) is None:
            return  # the engine is not up yet
        calls = any(is_ours(module) for module in modules)
        self._seconds[modules[0], frame.f_code.co_qualname, calls] += seconds
        self._interruptions += 1
        if self._interruptions % _KEPT_EVERY == 0:
            self._keep()

    def _keep(self) -> None:
        rows = [(*key, seconds) for key, seconds in self._seconds.items()]
        fresh = self._path.with_suffix(".tmp")
        fresh.write_text(json.dumps(rows))
        fresh.replace(self._path)


def is_ours(module: str) -> bool:
    """Whether a module is a part of kvgraph that an engine runs."""
    return module.startswith("kvgraph.")  # and not of kvgraph_bench


def _modules_to_loop(frame: FrameType) -> list[str] | None:
    """The modules of a frame and of its callers up to the engine core's loop; None outside it."""
    modules: list[str] = []
    at: FrameType | None = frame
    while at is not None:
        name: Any = at.f_globals.get("__name__", "")
        modules.append(str(name))
        if at.f_code.co_name == _LOOP:
            return modules
        at = at.f_back
    return None


class ProfiledExecutor(SleepingExecutor):
    """Given to ``vllm serve`` by its name."""

    def _init_executor(self) -> None:
        super()._init_executor()
        OwnTimes(Path(os.environ[OWN_TIMES])).start()
