"""The edge store: edges that no column implies, in columns, and running sums at each block.

These are CO_ATTEND, SEMANTIC and MEMORY_REF edges; ``all_edges`` answers for edges of any type. A
node id is as in ``edge_list``. The sums are kept beside the block table, so that a score never
walks edges.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..columns.columns import Columns, column, more_than
from ..columns.hash_index import HashIndex
from ..columns.row_pool import RowPool
from ..types import NO_ROW, EdgeType, Keys, Rows
from .block_columns import Mask
from .blocks import BlockTable, Selection
from .edge_list import BLOCK_TO_BLOCK, EdgeList, Weights

STORED: Final = (EdgeType.CO_ATTEND, EdgeType.SEMANTIC, EdgeType.MEMORY_REF)
_INITIAL_EDGES: Final = 1024  # chosen
_MAX_DEGREE: Final = np.iinfo(np.uint16).max  # a count that has reached it stays
_ALL: Final = slice(None)
Places = npt.NDArray[np.intp]


class EdgeStore(Columns):
    """Typed, weighted edges; at most one of a type between two nodes. Valid where ``alive``.

    Attributes:
        counts: int64 ``[edge types]``, zero for types that are not ``STORED``.
    """

    alive: Mask = column(np.bool_, False)
    source: Rows = column(np.int32, 0)  # node ids
    target: Rows = column(np.int32, 0)
    kind: npt.NDArray[np.uint8] = column(np.uint8, 0)  # types.EdgeType
    weight: Weights = column(np.float32, 0.0)
    updated: npt.NDArray[np.float64] = column(np.float64, 0.0, time=True)

    def __init__(self, blocks: BlockTable) -> None:
        super().__init__(_INITIAL_EDGES)
        self._blocks = blocks
        self._index = HashIndex(_INITIAL_EDGES)
        self._rows = RowPool()
        self.counts = np.zeros(len(EdgeType), dtype=np.int64)

    def __len__(self) -> int:
        return len(self._index)

    @property
    def size(self) -> int:
        """Rows below this were used at some time."""
        return self._rows.size

    @property
    def nbytes(self) -> int:
        return self.columns_nbytes + self._index.nbytes + self._rows.nbytes

    def upsert(
        self, kind: EdgeType, sources: Rows, targets: Rows, weights: Weights, now: float
    ) -> None:
        """Set the weight of edges ``sources[i] → targets[i]``, creating those that are not there.

        Repeated pairs are allowed; the last weight wins.
        """
        keys, last = _last_of_each(_edge_keys(kind, sources, targets))
        sources, targets, weights = sources[last], targets[last], weights[last]
        rows = self._index.find(keys)
        known = rows != NO_ROW
        self._change_weights(kind, rows[known], weights[known], now)
        if not known.all():
            fresh = ~known
            self._create(kind, keys[fresh], sources[fresh], targets[fresh], weights[fresh], now)

    def remove(self, rows: Rows) -> None:
        """Remove edges, by their own rows; see ``at``."""
        for kind in STORED:
            of_kind = rows[self.kind[rows] == int(kind)]
            if of_kind.size == 0:
                continue
            self.counts[kind] -= len(of_kind)
            self._add_degree(kind, of_kind, -1)
            self._add_weight(kind, of_kind, -self.weight[of_kind])
        self._index.remove(rows)
        self.alive[rows] = False
        self._rows.give_back(rows)

    def tidying(self) -> Iterator[None]:
        """As that of ``BlockTable``."""
        yield from self._index.tidying()
        yield from self.growing_ahead(self.size)

    def touching(self, among: Mask) -> EdgeList:
        """The edges at blocks of which ``among``, bool ``[blocks.size]``, is true; a scan."""
        rows = self.at(among, 0, self.size)
        return EdgeList(self.kind[rows], self.source[rows], self.target[rows], self.weight[rows])

    def of_kind(self, kind: EdgeType, part: slice = _ALL) -> Rows:
        """int32: the edges of one type, in a part of the store or in all of it."""
        start, end, _ = part.indices(self.size)
        mask = self.alive[start:end] & (self.kind[start:end] == int(kind))
        return (start + np.flatnonzero(mask)).astype(np.int32)

    def weight_between(self, kind: EdgeType, sources: Rows, targets: Rows) -> Weights:
        """float32 ``[n]``: the weight of each edge, 0 where there is none."""
        rows = self._index.find(_edge_keys(kind, sources, targets))
        return np.where(rows == NO_ROW, np.float32(0), self.weight[rows])

    def degree(self, kind: EdgeType, picked: Selection) -> npt.NDArray[np.uint16]:
        """uint16 ``[len(picked)]``: edges of a type at each of these blocks."""
        if kind not in self._blocks.sums:
            return np.zeros(len(picked), dtype=np.uint16)
        return picked.of(self._blocks.sums[kind].degree)

    def weight_sum(self, kind: EdgeType, picked: Selection) -> Weights:
        """float32 ``[len(picked)]``: their weights, summed."""
        if kind not in self._blocks.sums:
            return np.zeros(len(picked), dtype=np.float32)
        return picked.of(self._blocks.sums[kind].weight)

    def decay(self, kind: EdgeType, factor: float, floor: float, now: float, part: slice) -> None:
        """Multiply a type's weights in ``part``; edges that fall below ``floor`` go."""
        rows = self.of_kind(kind, part)
        if rows.size == 0:
            return
        decayed = self.weight[rows] * np.float32(factor)
        faint = decayed < floor
        self._change_weights(kind, rows[~faint], decayed[~faint], now)
        self.remove(rows[faint])

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """The live edges, by column name."""
        live = np.flatnonzero(self.alive[: self.size])
        return {name: each[live] for name, each in self.views(self.size).items()}

    def load_columns(self, columns: dict[str, npt.NDArray[Any]]) -> None:
        """Fill an empty store with what ``columns()`` gave, and sum up at the blocks."""
        count = len(columns["kind"])
        self._reserve(count)
        self._rows.restore(count, np.empty(0, dtype=np.int32))
        self.fill(columns, count)
        kinds = columns["kind"].astype(np.uint64)
        self._index.insert(
            _pack_keys(kinds, self.source[:count], self.target[:count]),
            np.arange(count, dtype=np.int32),
        )
        self.counts[:] = np.bincount(columns["kind"], minlength=len(EdgeType))
        for kind in STORED:
            if self.counts[kind]:
                self._sum_up(kind)

    def totals(self, kind: EdgeType) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Degree and weight sum ``[blocks.size]`` of a type, counted afresh from the edges."""
        rows = self.of_kind(kind)
        ends, edge = self._block_ends(kind, rows)
        size = self._blocks.size
        weights = np.bincount(ends, self.weight[rows][edge], minlength=size)
        return np.bincount(ends, minlength=size), weights

    def _sum_up(self, kind: EdgeType) -> None:
        degree, weight = self.totals(kind)
        sums = self._blocks.sums_of(kind)
        sums.degree[: len(degree)] = np.minimum(degree, _MAX_DEGREE)
        sums.weight[: len(weight)] = weight

    def at(self, among: Mask, start: int, end: int) -> Rows:
        """int32: edges from ``start`` to ``end`` at blocks of which ``among``, bool
        ``[blocks.size]``, is true."""
        part = slice(start, end)
        touching = among[self.source[part]]
        inner = np.flatnonzero(np.isin(self.kind[part], [int(kind) for kind in BLOCK_TO_BLOCK]))
        touching[inner] |= among[self.target[part][inner]]
        return (start + np.flatnonzero(touching & self.alive[part])).astype(np.int32)

    def _create(
        self,
        kind: EdgeType,
        keys: Keys,
        sources: Rows,
        targets: Rows,
        weights: Weights,
        now: float,
    ) -> None:
        rows = self._rows.take(len(keys))
        self._reserve(self.size)
        self._index.insert(keys, rows)
        self.alive[rows] = True
        self.source[rows], self.target[rows] = sources, targets
        self.kind[rows], self.weight[rows], self.updated[rows] = int(kind), weights, now
        self.counts[kind] += len(rows)
        self._add_degree(kind, rows, 1)
        self._add_weight(kind, rows, weights)

    def _change_weights(self, kind: EdgeType, rows: Rows, weights: Weights, now: float) -> None:
        self._add_weight(kind, rows, weights - self.weight[rows])
        self.weight[rows] = weights
        self.updated[rows] = now

    def _add_degree(self, kind: EdgeType, rows: Rows, step: int) -> None:
        degree = self._blocks.sums_of(kind).degree
        touched, count = np.unique(self._block_ends(kind, rows)[0], return_counts=True)
        before = degree[touched].astype(np.int64)
        after = np.minimum(before + step * count, _MAX_DEGREE)
        degree[touched] = np.where(before == _MAX_DEGREE, _MAX_DEGREE, after)

    def _add_weight(self, kind: EdgeType, rows: Rows, change: Weights) -> None:
        ends, edge = self._block_ends(kind, rows)
        np.add.at(self._blocks.sums_of(kind).weight, ends, change[edge])

    def _block_ends(self, kind: EdgeType, rows: Rows) -> tuple[Rows, Places]:
        """The blocks at these edges' ends, and which of the edges each is of."""
        source, each = self.source[rows], np.arange(len(rows))
        if kind not in BLOCK_TO_BLOCK:
            return source, each
        return np.concatenate([source, self.target[rows]]), np.concatenate([each, each])

    def _reserve(self, edges: int) -> None:
        if edges > len(self.alive):
            self.grow(max(edges, more_than(len(self.alive))))

    def growing(self, capacity: int) -> Iterator[None]:
        yield from self._index.growing(capacity)
        yield from super().growing(capacity)


def _edge_keys(kind: EdgeType, sources: Rows, targets: Rows) -> Keys:
    return _pack_keys(np.uint64(int(kind)), sources, targets)


def _pack_keys(kinds: Any, sources: Rows, targets: Rows) -> Keys:
    """One uint64 of type (3 bits), source (29 bits) and target (32 bits)."""
    packed = (kinds << np.uint64(61)) | (sources.astype(np.uint64) << np.uint64(32))
    return np.asarray(packed | targets.astype(np.uint64), dtype=np.uint64)


def _last_of_each(keys: Keys) -> tuple[Keys, npt.NDArray[np.intp]]:
    """Distinct keys, and where each stood last."""
    distinct, first_from_end = np.unique(keys[::-1], return_index=True)
    return distinct, len(keys) - 1 - first_from_end
