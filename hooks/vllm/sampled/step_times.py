"""How long decode steps take on a GPU, and how much longer those take that are sampled.

A sampled step does without its CUDA graph, and the GPU works on it after the runner has gone on. So
what it costs is seen in the clock alone: in how much later than usual the next steps begin.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, Final

_REMEMBERED: Final = 32  # steps of a size; chosen
_ENOUGH: Final = 8  # of them, before a step of that size is sampled; chosen
_WINDOW: Final = 3  # steps from a sampled one on: as many as vLLM has under way at once, and one
_UNKNOWN: Final = 0  # requests that decode, where a step does anything else too


class StepTimes:
    """Times from one step's beginning to the next one's, of steps that only decode.

    They count where the next step decodes as many requests: then the engine was busy in between.

    Args:
        clock: Monotonic seconds.
        sizes: Batches that CUDA graphs were captured for, ascending: others are padded to them.
    """

    def __init__(self, clock: Callable[[], float], sizes: Sequence[int]) -> None:
        self._clock, self._sizes = clock, tuple(sizes)
        self._times: dict[int, deque[float]] = {}
        self._began, self._decoding = clock(), _UNKNOWN
        self._extra: list[float] | None = None  # of the steps since a sampled one began
        self._broken = False  # no more can be told of them
        self._busy_s = 0.0

    def busy(self) -> float:
        """Seconds of all the steps that count."""
        return self._busy_s

    def begin(self, scheduler_output: Any) -> None:
        """Note that a step begins."""
        now, decoding = self._clock(), _decoding(scheduler_output)
        if decoding == self._decoding != _UNKNOWN:
            self._passed(now - self._began)
        else:
            self._broken = self._extra is not None
        self._began, self._decoding = now, decoding

    @property
    def can_tell(self) -> bool:
        """Whether it will be known what it costs to sample this step."""
        if self._extra is not None or self._decoding == _UNKNOWN:
            return False
        return len(self._times.get(self._size(), ())) >= _ENOUGH

    def sampling(self) -> None:
        """This step is sampled: it and the next ones may take longer."""
        self._extra = []

    def settled(self, expected: float) -> float | None:
        """Seconds that the last sampled step cost, told once; None while that is not known.

        Args:
            expected: What it is taken for at least, where other work came too soon behind it.
        """
        if self._extra is None or (len(self._extra) < _WINDOW and not self._broken):
            return None
        least = expected if self._broken else 0.0
        extra, self._extra, self._broken = self._extra, None, False
        return max(least, sum(extra))

    def _passed(self, seconds: float) -> None:
        self._busy_s += seconds
        times = self._times.setdefault(self._size(), deque(maxlen=_REMEMBERED))
        if self._extra is None:
            times.append(seconds)
        else:
            self._extra.append(seconds - median(times) if times else 0.0)

    def _size(self) -> int:
        at = bisect_left(self._sizes, self._decoding)
        return self._sizes[at] if at < len(self._sizes) else self._decoding


def _decoding(scheduler_output: Any) -> int:
    """How many requests a step decodes, one token each; ``_UNKNOWN`` if it does more."""
    count = len(scheduler_output.num_scheduled_tokens)
    if scheduler_output.scheduled_new_reqs:
        return _UNKNOWN
    return count if scheduler_output.total_num_scheduled_tokens == count else _UNKNOWN
