"""Tables of the fastest method to move bytes, by run size and count."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple


class Method(NamedTuple):
    """A way to move bytes between host and GPU."""

    # Copies: copy_engine or kernel. Splices: direct (one kernel that reads host memory) or staged.
    name: str
    grid: int  # thread blocks of a kernel that reads or writes host memory


_GRIDS: Final = (16, 32, 64, 128)
COPY_ENGINE: Final = Method("copy_engine", 0)
# In the order of how much they take from the engine's own compute.
COPY_METHODS: Final = (COPY_ENGINE, *(Method("kernel", grid) for grid in _GRIDS))
SPLICE_METHODS: Final = (*(Method("direct", grid) for grid in _GRIDS), Method("staged", 0))
_SIZES: Final = tuple(1 << bits for bits in range(11, 22, 2))  # 2 KiB … 2 MiB
_COUNTS: Final = (1, 16, 256, 4096)
_LARGEST: Final = 64 << 20  # most bytes moved in one measurement; chosen
COPY_CELLS: Final = tuple(
    (size, count) for size in _SIZES for count in _COUNTS if size * count <= _LARGEST
)
SPLICE_CELLS: Final = tuple((1, _LARGEST >> shift) for shift in (8, 6, 4, 2, 0))  # (1, bytes)
_CLOSE: Final = 1.03  # a method that takes less from the engine may be this much slower; chosen


@dataclass(frozen=True)
class MethodTable:
    """The best method at each (run size in bytes, number of runs)."""

    winners: dict[tuple[int, int], Method]

    def best(self, run_bytes: int, runs: int) -> Method:
        """Return the best method at the nearest measured size and, for that size, the nearest
        count.
        """
        size = min({at[0] for at in self.winners}, key=lambda known: _apart(known, run_bytes))
        counts = [at[1] for at in self.winners if at[0] == size]
        return self.winners[size, min(counts, key=lambda known: _apart(known, runs))]


def measured(
    seconds: Callable[[Method, int, int], float],
    methods: Iterable[Method],
    cells: Iterable[tuple[int, int]],
) -> MethodTable:
    """Return, per cell, the first of ``methods`` that is about as fast as the fastest. ``seconds``
    gives a method's duration for (run size, count).
    """
    winners = {}
    for cell in cells:
        times = {method: seconds(method, *cell) for method in methods}
        enough = _CLOSE * min(times.values())
        winners[cell] = next(method for method, time in times.items() if time <= enough)
    return MethodTable(winners)


def _apart(known: int, value: int) -> float:
    return abs(math.log2(known / max(value, 1)))
