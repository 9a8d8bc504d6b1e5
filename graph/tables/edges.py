"""The edge store: all six types in one set of columns, and running aggregates at each block.

A node id means a block row, except as the target of SPILL_LINK (a copy id) and MEMORY_REF (an
interned memory name). A PREFIX_SHARE edge from a block to itself is the link from the root, the
empty prefix, to the first block of a chain. The aggregates stand in the block table's ``degree``
and ``edge_weight``, so that a score never walks edges.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..types import NO_ROW, EdgeType, Keys, Rows, Tier
from .blocks import BlockTable
from .hash_index import HashIndex
from .row_pool import RowPool

_INITIAL_EDGES: Final = 1024
_MAX_DEGREE: Final = np.iinfo(np.uint16).max  # a count that reached it stays there

BLOCK_TO_BLOCK: Final = frozenset(
    {EdgeType.PREFIX_SHARE, EdgeType.CO_ATTEND, EdgeType.SEMANTIC, EdgeType.TEMPORAL}
)
Weights = npt.NDArray[np.float32]
Places = npt.NDArray[np.intp]


def copy_id(rows: Rows, tier: Tier) -> Rows:
    """The COPY node of each block in a colder tier."""
    return rows * 2 + int(tier is Tier.COLD)


def is_from_root(kind: EdgeType, source: int, target: int) -> bool:
    """Whether an edge is the link from the root to the first block of a chain."""
    return kind is EdgeType.PREFIX_SHARE and source == target


class EdgeStore:
    """Typed, weighted edges; at most one of a type between two nodes.

    Attributes (arrays of length ``capacity``; valid where ``alive``):
        source, target: int32 node ids.
        kind: uint8, types.EdgeType.
        weight: float32.
        updated: float64, monotonic seconds.
    """

    def __init__(self, blocks: BlockTable) -> None:
        self._blocks = blocks
        self._index = HashIndex(_INITIAL_EDGES)
        self._rows = RowPool()
        self.alive = np.zeros(_INITIAL_EDGES, dtype=np.bool_)
        self.source = np.zeros(_INITIAL_EDGES, dtype=np.int32)
        self.target = np.zeros(_INITIAL_EDGES, dtype=np.int32)
        self.kind = np.zeros(_INITIAL_EDGES, dtype=np.uint8)
        self.weight = np.zeros(_INITIAL_EDGES, dtype=np.float32)
        self.updated = np.zeros(_INITIAL_EDGES, dtype=np.float64)
        self.counts = np.zeros(len(EdgeType), dtype=np.int64)

    def __len__(self) -> int:
        return len(self._index)

    @property
    def size(self) -> int:
        """Rows below this were used at some time."""
        return self._rows.size

    @property
    def nbytes(self) -> int:
        arrays = [getattr(self, name).nbytes for name in _EDGE_COLUMNS]
        return int(sum(arrays) + self._index.nbytes + self._rows.nbytes)

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

    def remove_between(self, kind: EdgeType, sources: Rows, targets: Rows) -> None:
        """Remove edges ``sources[i] → targets[i]`` where they exist."""
        rows = self._index.find(np.unique(_edge_keys(kind, sources, targets)))
        self._remove(rows[rows != NO_ROW])

    def remove_at(self, block_rows: Rows) -> None:
        """Remove every edge that touches one of these blocks."""
        gone = np.zeros(self._blocks.size, dtype=np.bool_)
        gone[block_rows] = True
        source, target = self.source[: self.size], self.target[: self.size]
        dead = gone[source]
        inner = np.flatnonzero(np.isin(self.kind[: self.size], [int(k) for k in BLOCK_TO_BLOCK]))
        dead[inner] |= gone[target[inner]]
        self._remove(np.flatnonzero(dead & self.alive[: self.size]).astype(np.int32))

    def at(self, block_row: int) -> Rows:
        """int32: the edges that touch this block."""
        mask = self.source[: self.size] == block_row
        inner = np.isin(self.kind[: self.size], [int(k) for k in BLOCK_TO_BLOCK])
        mask |= inner & (self.target[: self.size] == block_row)
        return np.flatnonzero(mask & self.alive[: self.size]).astype(np.int32)

    def of_kind(self, kind: EdgeType) -> Rows:
        """int32: the edges of one type."""
        mask = self.alive[: self.size] & (self.kind[: self.size] == int(kind))
        return np.flatnonzero(mask).astype(np.int32)

    def weight_between(self, kind: EdgeType, sources: Rows, targets: Rows) -> Weights:
        """float32 ``[n]``: the weight of each edge, 0 where there is none."""
        rows = self._index.find(_edge_keys(kind, sources, targets))
        return np.where(rows == NO_ROW, np.float32(0), self.weight[rows])

    def decay(self, kind: EdgeType, factor: float, floor: float, now: float) -> None:
        """Multiply a type's weights by ``factor``; edges that fall below ``floor`` go."""
        rows = self.of_kind(kind)
        if rows.size == 0:
            return
        decayed = self.weight[rows] * np.float32(factor)
        faint = decayed < floor
        self._change_weights(kind, rows[~faint], decayed[~faint], now)
        self._remove(rows[faint])

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """The live edges, by column name."""
        live = np.flatnonzero(self.alive[: self.size])
        return {name: getattr(self, name)[live] for name in _EDGE_COLUMNS if name != "alive"}

    def load_columns(self, columns: dict[str, npt.NDArray[Any]]) -> None:
        """Fill an empty store with what ``columns()`` gave; leaves the aggregates to the blocks."""
        count = len(columns["kind"])
        self._reserve(count)
        self._rows.restore(count, np.empty(0, dtype=np.int32))
        self.alive[:count] = True
        for name, column in columns.items():
            getattr(self, name)[:count] = column
        kinds = columns["kind"].astype(np.uint64)
        self._index.insert(
            _pack_keys(kinds, self.source[:count], self.target[:count]),
            np.arange(count, dtype=np.int32),
        )
        self.counts[:] = np.bincount(columns["kind"], minlength=len(EdgeType))

    def aggregates(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Degree and weight sum ``[edge types, blocks.size]``, counted afresh from the edges."""
        shape = (len(EdgeType), self._blocks.size)
        degree, weight = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.float64)
        for kind in EdgeType:
            rows = self.of_kind(kind)
            ends, edge = self._block_ends(kind, rows)
            degree[kind] += np.bincount(ends, minlength=shape[1])
            weight[kind] += np.bincount(ends, self.weight[rows][edge], minlength=shape[1])
        return degree, weight

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

    def _remove(self, rows: Rows) -> None:
        for kind in EdgeType:
            of_kind = rows[self.kind[rows] == int(kind)]
            if of_kind.size == 0:
                continue
            self.counts[kind] -= len(of_kind)
            self._add_degree(kind, of_kind, -1)
            self._add_weight(kind, of_kind, -self.weight[of_kind])
        self._index.remove(rows)
        self.alive[rows] = False
        self._rows.give_back(rows)

    def _change_weights(self, kind: EdgeType, rows: Rows, weights: Weights, now: float) -> None:
        self._add_weight(kind, rows, weights - self.weight[rows])
        self.weight[rows] = weights
        self.updated[rows] = now

    def _add_degree(self, kind: EdgeType, rows: Rows, step: int) -> None:
        degree = self._blocks.degree[kind]
        touched, count = np.unique(self._block_ends(kind, rows)[0], return_counts=True)
        before = degree[touched].astype(np.int64)
        after = np.minimum(before + step * count, _MAX_DEGREE)
        degree[touched] = np.where(before == _MAX_DEGREE, _MAX_DEGREE, after)

    def _add_weight(self, kind: EdgeType, rows: Rows, change: Weights) -> None:
        ends, edge = self._block_ends(kind, rows)
        np.add.at(self._blocks.edge_weight[kind], ends, change[edge])

    def _block_ends(self, kind: EdgeType, rows: Rows) -> tuple[Rows, Places]:
        """The blocks at these edges' ends, and which of the edges each is of; the root is none."""
        source, target, each = self.source[rows], self.target[rows], np.arange(len(rows))
        if kind not in BLOCK_TO_BLOCK:
            return source, each
        inner = np.flatnonzero(source != target)
        return np.concatenate([source, target[inner]]), np.concatenate([each, inner])

    def _reserve(self, edges: int) -> None:
        capacity = len(self.alive)
        if edges <= capacity:
            return
        capacity = max(edges, capacity + capacity // 8)
        self._index.grow(capacity)
        for name in _EDGE_COLUMNS:
            column = getattr(self, name)
            grown = np.zeros(capacity, dtype=column.dtype)
            grown[: len(column)] = column
            setattr(self, name, grown)


_EDGE_COLUMNS: Final = ("alive", "source", "target", "kind", "weight", "updated")


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
