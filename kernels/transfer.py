"""Copy engine or kernel: a table measured on the machine, for run sizes and counts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

METHODS: Final = ("copy_engine", "kernel")
SIZES: Final = tuple(1 << bits for bits in range(11, 22, 2))  # 2 KiB … 2 MiB
COUNTS: Final = (1, 16, 256, 4096)
LARGEST: Final = 64 << 20  # bytes that one measurement moves at most


@dataclass(frozen=True)
class MethodTable:
    """Which method was faster at each (run size in bytes, number of runs)."""

    winners: dict[tuple[int, int], str]

    def best(self, run_bytes: int, runs: int) -> str:
        """The winner at the nearest measured size and, for that size, the nearest count."""
        size = min({at[0] for at in self.winners}, key=lambda known: _apart(known, run_bytes))
        counts = [at[1] for at in self.winners if at[0] == size]
        return self.winners[size, min(counts, key=lambda known: _apart(known, runs))]


def _apart(known: int, value: int) -> float:
    return abs(math.log2(known / max(value, 1)))


def measured(seconds: Callable[[str, int, int], float]) -> MethodTable:
    """Fill the table.

    Args:
        seconds: Time that a method takes for (run size, count).
    """
    winners = {}
    for size in SIZES:
        for count in COUNTS:
            if size * count <= LARGEST:
                times = {method: seconds(method, size, count) for method in METHODS}
                winners[size, count] = min(METHODS, key=times.__getitem__)
    return MethodTable(winners)
