"""``WindowPlay``: the remembered requests once more, in a pool that evicts by given scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from ...graph.columns.columns import grown
from ...graph.ranking.policy import Scores
from ...graph.ranking.view import View
from ...graph.tables.blocks import Selection
from ...graph.types import NO_ROW
from ..policies.shadow import RankedShadow
from .ceiling import Walked, blocks_asked
from .other_weights import OtherWeights

_RANKED_EVERY: Final = 16  # requests; chosen
_MOST_BLOCKS: Final = 100_000  # of the last requests that are played; chosen: a second at most


class WindowPlay:
    """The last requests of a window, oldest first.

    Scores are as of now, since nobody keeps what blocks were like at each request: so what is found
    tells two weightings apart, and is not what a pool would have found then.

    Args:
        window: Requests, the oldest first.
        capacity: Blocks of the pool.

    Attributes:
        keys: uint64 ``[n]``: the blocks that are asked for, each once; ``scores`` belong to them.
        asked: Blocks that are asked for, in all.
    """

    def __init__(self, window: Sequence[Walked], capacity: int) -> None:
        last = _last(window)
        self._capacity = capacity
        self._reach = [each.reach for each in last]
        together = np.concatenate([each.keys for each in last] or [np.empty(0, dtype=np.uint64)])
        self.keys, places = np.unique(together, return_inverse=True)
        ends = np.cumsum([len(each.keys) for each in last])
        self._asked = np.split(places.astype(np.int32), ends[:-1])
        self.requests, self.asked = sum(each.asked for each in last), blocks_asked(last)

    def scores(self, view: View, weights: OtherWeights) -> Scores:
        """float64 ``[n]``: as ``weights`` score them now; what is no longer known goes first."""
        rows = view.blocks.find(self.keys)
        known = np.flatnonzero(rows != NO_ROW)
        known = known[np.argsort(rows[known])]
        found = np.full(len(rows), np.inf)
        found[known] = weights.whole_scores(view, Selection(view.blocks, rows[known]))
        return found

    def found(self, scores: Scores) -> int:
        """How many of the blocks a pool finds that evicts the highest of these scores first."""
        pool, total = RankedShadow(self._capacity), 0
        keys = grown(self.keys, len(self.keys) + 1)
        for number, (rows, reach) in enumerate(zip(self._asked, self._reach, strict=False)):
            if number % _RANKED_EVERY == 0:
                held = pool.rows(keys)
                pool.adopt(held, scores[held])
            total += pool.found(rows[:reach], keys[rows[:reach]])
            pool.use(rows, keys[rows])
        return total


def _last(window: Sequence[Walked]) -> list[Walked]:
    """As many of the last requests as have ``_MOST_BLOCKS`` blocks."""
    left, found = _MOST_BLOCKS, list[Walked]()
    for each in reversed(window):
        left -= len(each.keys)
        if left < 0:
            break
        found.append(each)
    return found[::-1]
