"""CO_ATTEND edges: between blocks that decode steps read together, from the third time on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import combinations
from typing import Final

import numpy as np
import numpy.typing as npt

from ..messages.events import BlocksAttended
from ..tables.block_columns import Mask
from ..tables.tables import Tables
from ..types import NO_ROW, Authority, EdgeType, Rows, as_keys

_MAX_BLOCKS_A_STEP: Final = 16  # the most attended ones: 120 pairs; chosen
_FADES_S: Final = 60.0  # seconds from one fading of all edges to the next; chosen
_PART: Final = 1 << 16  # edges that fade in one slice; chosen
_FLOOR: Final = 0.05
_MOST_MASS: Final = 1e6  # a share is 1 at most, summed over heads and layers; chosen
_EMA_SHARE: Final = 0.2  # of the newest sample in the mean of attention; chosen
_MUCH: Final = 2.0  # times what a block would get if all got the same; chosen
_GAIN: Final = 0.05  # of what importance lacks to the most, per sample; chosen
_MOST_IMPORTANT: Final = np.float32(0.8)  # that attention makes of a block; chosen
_KIND: Final = EdgeType.CO_ATTEND
_NOTHING: Final = np.empty(0, dtype="<f4")


class CoAttendance:
    """Counts block pairs until they make an edge; then the edge carries the count, decaying."""

    def __init__(self, tables: Tables, counters: Counter[str]) -> None:
        self._tables = tables
        self._counters = counters
        self._counts: dict[tuple[int, int], int] = {}
        self._faded: float | None = None

    def attended(self, engine: int, event: BlocksAttended, now: float) -> None:
        """A sampled decode step read these blocks, each with its share of the attention."""
        whole = len(event.mass) % 4 == 0 and len(event.hashes) == 2 * len(event.mass)
        mass = np.frombuffer(event.mass, dtype="<f4") if whole else _NOTHING
        if not whole or not ((mass >= 0) & (mass <= _MOST_MASS)).all():
            self._counters["events_refused"] += 1
            return
        blocks = self._tables.blocks
        found = blocks.find(as_keys(event.hashes), self._tables.salt(engine))
        rows, first = np.unique(found, return_index=True)
        mass, rows = mass[first][rows != NO_ROW], rows[rows != NO_ROW]
        blocks.last_attended[rows] = now
        attention = blocks.for_writing("attention")
        attention[rows] += _EMA_SHARE * (mass - attention[rows])
        self._raise(rows[mass > _MUCH / max(1, len(mass))])
        self.observe(rows, mass, now)

    def _raise(self, rows: Rows) -> None:
        """Let blocks that are much attended grow in importance, where nobody stated it."""
        blocks = self._tables.blocks
        rows = rows[blocks.stated[rows] == int(Authority.INFERRED)]
        lacking = _MOST_IMPORTANT - blocks.importance[rows]
        blocks.importance[rows] += np.float32(_GAIN) * np.maximum(lacking, 0)

    def observe(self, rows: Rows, mass: npt.NDArray[np.float32], now: float) -> None:
        """Count one sampled step that read these block rows (distinct) with this softmax mass."""
        top = np.sort(rows[np.argsort(-mass, kind="stable")[:_MAX_BLOCKS_A_STEP]])
        pairs = np.array(list(combinations(top.tolist(), 2)), dtype=np.int32).reshape(-1, 2)
        weights = self._tables.edges.weight_between(_KIND, pairs[:, 0], pairs[:, 1])
        known = weights > 0
        self._write(pairs[known], weights[known] + 1, now)
        ripe = [pair for pair in map(tuple, pairs[~known].tolist()) if self._count(pair)]
        after = self._tables.limits.co_attend_after
        self._write(
            np.array(ripe, dtype=np.int32).reshape(-1, 2),
            np.full(len(ripe), after, dtype=np.float32),
            now,
        )

    def fading(self, now: float) -> Iterator[None]:
        """Once a minute, let all edges fade, slice by slice; no event may be applied meanwhile."""
        if self._faded is None:
            self._faded = now
        elapsed = now - self._faded
        if elapsed < _FADES_S:
            return
        self._faded, edges = now, self._tables.edges
        factor = 0.5 ** (elapsed / self._tables.limits.co_attend_half_life_s)
        for start in range(0, edges.size if edges.counts[_KIND] else 0, _PART):
            edges.decay(_KIND, factor, _FLOOR, now, slice(start, start + _PART))
            yield

    def forget(self, gone: Mask) -> None:
        """The rows of which ``gone``, bool ``[blocks.size]``, is true are about to be reused."""
        if self._counts:
            lost = gone.tobytes()
            self._counts = {
                pair: count
                for pair, count in self._counts.items()
                if not (lost[pair[0]] or lost[pair[1]])
            }

    def _count(self, pair: tuple[int, int]) -> bool:
        """Count a pair once more; true, and it is counted no longer, if it makes an edge now."""
        count = self._counts.pop(pair, 0) + 1
        if count >= self._tables.limits.co_attend_after:
            return True
        self._counts[pair] = count  # at the end: the dict keeps the longest untouched first
        if len(self._counts) > self._tables.limits.max_pairs:
            del self._counts[next(iter(self._counts))]
        return False

    def _write(self, pairs: Rows, weights: npt.NDArray[np.float32], now: float) -> None:
        if len(pairs):
            self._tables.edges.upsert(_KIND, pairs[:, 0], pairs[:, 1], weights, now)
