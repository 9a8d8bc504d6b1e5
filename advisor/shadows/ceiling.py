"""An upper bound for every eviction order on the remembered requests: Belady's."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ...graph.ranking.policy import Scores, View
from ...graph.tables.blocks import Selection
from ...graph.tables.columns import grown
from ...graph.types import NO_ROW, Keys
from ..policies.shadow import RankedShadow
from ..replay.fast import belady
from .pools import OtherWeights

MOST_BLOCKS: Final = 400_000  # blocks remembered; chosen: 3 MB, and a second to process


class WindowRequest(NamedTuple):
    """One request; ``reach``: how many of its blocks a prefix match could have covered."""

    keys: Keys
    reach: int
    found: int  # blocks found by the live pool
    # False: no prompt requested these blocks, which are an answer.
    asked: bool = True
    there: int = 0  # found by the live pool, or by a simulated one of its size that found more
    counts: array[int] | None = None  # the simulated pools' counts before it (``ShadowSet.counts``)


class Ceiling(NamedTuple):
    """Blocks that requests asked for, and how many Belady's algorithm and the engine found."""

    asked: int = 0
    found: int = 0
    ours: int = 0


class FoundOf(NamedTuple):
    """Blocks that some requests asked for, and what of them a shadow found."""

    asked: int
    found: int


class RequestWindow:
    """The last requests, as many as have ``MOST_BLOCKS`` blocks."""

    def __init__(self) -> None:
        self._asked: deque[WindowRequest] = deque()
        self._blocks = self._since = 0

    def add(
        self, keys: Keys, reach: int, found: int, there: int = 0, counts: array[int] | None = None
    ) -> None:
        """Add a request for these blocks, the first ``found`` of which the live pool had."""
        self._add(WindowRequest(keys, reach, found, True, max(found, there), counts))

    def answered(self, keys: Keys) -> None:
        """Add the blocks that an answer left, which the next turn may ask for."""
        if len(keys):
            self._add(WindowRequest(keys, 0, 0, asked=False))

    def _add(self, asked: WindowRequest) -> None:
        self._asked.append(asked)
        self._since += 1
        self._blocks += len(asked.keys)
        while self._blocks > MOST_BLOCKS and len(self._asked) > 1:
            self._blocks -= len(self._asked.popleft().keys)

    def begin(self) -> None:
        """Note that simulated pools of policies start to follow now: see ``since_begun``."""
        self._since = 0

    def taken(self) -> list[WindowRequest]:
        return list(self._asked)

    def since_begun(self) -> list[WindowRequest]:
        """As ``taken``, without requests from before the last ``begin``."""
        return list(self._asked)[max(0, len(self._asked) - self._since) :]


def blocks_asked(window: Sequence[WindowRequest]) -> int:
    return sum(len(each.keys) for each in window if each.asked)


def ceiling(window: Sequence[WindowRequest], capacity: int) -> Ceiling:
    """Return what Belady's algorithm would have found in the window.

    Blocks that the live pool, or a simulated one of its size, had at their first use here were
    there when the window began. Belady's pool starts with them too, so that none of these pools
    finds more.
    """
    if not window or capacity < 1:
        return Ceiling()
    keys = np.concatenate([asked.keys for asked in window])
    blocks = np.unique(keys, return_inverse=True)[1].astype(np.int32)
    ends = np.cumsum([len(asked.keys) for asked in window])
    starts = np.concatenate([[0], ends])
    seeds = _there_at_first(blocks, starts, [asked.there for asked in window])
    starts, blocks = np.append(0, starts + len(seeds)), np.append(seeds, blocks)
    reach = np.array([0, *(asked.reach for asked in window)], dtype=np.int32)
    found = belady(starts, blocks, reach, np.diff(starts).astype(np.int32), capacity)
    return Ceiling(blocks_asked(window), int(found.sum()), sum(each.found for each in window))


def _there_at_first(
    blocks: np.ndarray[tuple[int], np.dtype[np.int32]],
    starts: npt.NDArray[np.int64],
    found: Sequence[int],
) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Blocks whose first use was a hit, in the order of these uses."""
    place = np.arange(len(blocks))
    request = np.searchsorted(starts, place, side="right") - 1
    hit = place - starts[request] < np.asarray(found)[request]
    first = np.unique(blocks, return_index=True)[1]
    seeds: np.ndarray[tuple[int], np.dtype[np.int32]] = blocks[np.sort(first[hit[first]])]
    return seeds


_RANKED_EVERY: Final = 16  # requests; chosen
_MOST_BLOCKS: Final = 100_000  # of the last requests, to be replayed; chosen: a second at most


class WindowPlay:
    """The last requests of a window, oldest first.

    Scores are those of now, since blocks' states at each request are not stored: so the result
    compares two weightings, and is not what a pool would have found then.

    Attributes:
        keys: uint64 ``[n]``: the requested blocks, each once; ``scores`` are in this order.
        asked: Number of blocks requested in all.
    """

    def __init__(self, window: Sequence[WindowRequest], capacity: int) -> None:
        last = _last(window)
        self._capacity = capacity
        self._reach = [each.reach for each in last]
        together = np.concatenate([each.keys for each in last] or [np.empty(0, dtype=np.uint64)])
        self.keys, places = np.unique(together, return_inverse=True)
        ends = np.cumsum([len(each.keys) for each in last])
        self._asked = np.split(places.astype(np.int32), ends[:-1])
        self.requests, self.asked = sum(each.asked for each in last), blocks_asked(last)

    def scores(self, view: View, weights: OtherWeights) -> Scores:
        """Return scores under ``weights`` as of now, float64 ``[n]``; unknown blocks go first."""
        rows = view.blocks.find(self.keys)
        known = np.flatnonzero(rows != NO_ROW)
        known = known[np.argsort(rows[known])]
        found = np.full(len(rows), np.inf)
        found[known] = weights.whole_scores(view, Selection(view.blocks, rows[known]))
        return found

    def found(self, scores: Scores) -> int:
        """Return how many blocks a pool finds that evicts the highest scores first."""
        pool, total = RankedShadow(self._capacity), 0
        keys = grown(self.keys, len(self.keys) + 1)
        for number, (rows, reach) in enumerate(zip(self._asked, self._reach, strict=False)):
            if number % _RANKED_EVERY == 0:
                held = pool.rows(keys)
                pool.adopt(held, scores[held])
            total += pool.found(rows[:reach], keys[rows[:reach]])
            pool.use(rows, keys[rows])
        return total


def _last(window: Sequence[WindowRequest]) -> list[WindowRequest]:
    left, found = _MOST_BLOCKS, list[WindowRequest]()
    for each in reversed(window):
        left -= len(each.keys)
        if left < 0:
            break
        found.append(each)
    return found[::-1]
