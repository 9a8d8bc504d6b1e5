"""The longest unused of many rows, found without a copy of all their times in one stroke."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from ..tables.block_columns import Times
from ..types import Rows

# The border is looked for between two times of a sample of so many, so many places around it: it is
# nearly always there, and few others are. Both chosen.
_SAMPLE: Final = 4_096
_AROUND: Final = 256


def oldest(rows: Sequence[Rows], times: Sequence[Times], count: int) -> Rows:
    """int32 ``[count]``: the rows with the least times; of equal ones the first.

    Args:
        rows: int32 ``[n]`` each, ascending, part after part; ``times`` are theirs.
        count: At most as many as there are.
    """
    if not count:
        return np.empty(0, dtype=np.int32)
    border = _nth(times, count - 1)
    left = count - sum(int(np.count_nonzero(part < border)) for part in times)
    found = list[Rows]()
    for own, part in zip(rows, times, strict=True):
        older, ties = part < border, np.flatnonzero(part == border)[:left]
        older[ties] = True
        left -= len(ties)
        found.append(own[older])
    return np.concatenate(found)


def _nth(times: Sequence[Times], place: int) -> float:
    """The time that has this place among all of them, in ascending order."""
    total = sum(map(len, times))
    step = -(-total // _SAMPLE)
    sample = np.sort(np.concatenate([part[::step] for part in times]))
    near = place * len(sample) // total
    low = sample[near - _AROUND] if near >= _AROUND else -np.inf
    high = sample[near + _AROUND] if near + _AROUND < len(sample) else np.inf
    before = sum(int(np.count_nonzero(part < low)) for part in times)
    upto = sum(int(np.count_nonzero(part <= high)) for part in times)
    if not before <= place < upto:
        before, low, high = 0, -np.inf, np.inf
    if low == high:
        return float(low)
    between = np.concatenate([part[(part >= low) & (part <= high)] for part in times])
    return float(np.partition(between, place - before)[place - before])
