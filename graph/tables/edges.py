"""The edge store: edges that do not follow from columns (CO_ATTEND, SEMANTIC, MEMORY_REF), with
running sums at each block, so that scoring never walks edges. ``AllEdges`` handles edges of any
type.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ..types import NO_ROW, EdgeType, Keys, Rows, Tier
from .blocks import BlockTable, Mask, Selection
from .columns import Columns, RowPool, column, more_than
from .hash_index import HashIndex

# Edges as a reader sees them, whether stored or derived from columns.

Weights = npt.NDArray[np.float32]

BLOCK_TO_BLOCK: Final = frozenset(
    {EdgeType.PREFIX_SHARE, EdgeType.CO_ATTEND, EdgeType.SEMANTIC, EdgeType.TEMPORAL}
)


class Edge(NamedTuple):
    kind: EdgeType
    source: int
    target: int
    weight: float

    @property
    def is_from_root(self) -> bool:
        """Whether the edge links the root, the empty prefix, to the first block of a chain."""
        return self.kind is EdgeType.PREFIX_SHARE and self.source == self.target


@dataclass(frozen=True, slots=True, eq=False)
class EdgeList:
    """A list of edges, one array per property.

    A node id is a block row, except as the target of SPILL_LINK (a copy id) and MEMORY_REF (an
    interned memory name). A PREFIX_SHARE edge from a block to itself is the link from the root, the
    empty prefix, to the first block of a chain.
    """

    kind: npt.NDArray[np.uint8]  # uint8 ``[n]``, types.EdgeType
    # ``source``, ``target``: int32 ``[n]``, node ids.
    source: Rows
    target: Rows
    weight: Weights  # float32 ``[n]``

    @classmethod
    def of(cls, kind: EdgeType, source: Rows, target: Rows, weight: npt.NDArray[Any]) -> EdgeList:
        kinds = np.full(len(source), int(kind), dtype=np.uint8)
        return cls(kinds, source, target, weight.astype(np.float32, copy=False))

    @classmethod
    def joined(cls, parts: Sequence[EdgeList]) -> EdgeList:
        return cls(
            np.concatenate([each.kind for each in parts]),
            np.concatenate([each.source for each in parts]),
            np.concatenate([each.target for each in parts]),
            np.concatenate([each.weight for each in parts]),
        )

    def __len__(self) -> int:
        return len(self.kind)

    def __iter__(self) -> Iterator[Edge]:
        for kind, source, target, weight in zip(
            self.kind.tolist(),
            self.source.tolist(),
            self.target.tolist(),
            self.weight.tolist(),
            strict=True,
        ):
            yield Edge(EdgeType(kind), source, target, weight)


STORED: Final = (EdgeType.CO_ATTEND, EdgeType.SEMANTIC, EdgeType.MEMORY_REF)
_INITIAL_EDGES: Final = 1024  # chosen
_MAX_DEGREE: Final = np.iinfo(np.uint16).max  # a count that reached it stays there
_ALL: Final = slice(None)
Places = npt.NDArray[np.intp]


class EdgeStore(Columns):
    """Typed, weighted edges between rows in ``alive``; one of a type between two nodes."""

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
        # int64 ``[edge types]``, zero for types that are not ``STORED``.
        self.counts = np.zeros(len(EdgeType), dtype=np.int64)

    def __len__(self) -> int:
        return len(self._index)

    @property
    def size(self) -> int:
        """Rows below this have been used at some time."""
        return self._rows.size

    @property
    def nbytes(self) -> int:
        own = self.columns_nbytes(self.size) + self._index.nbytes(self.size)
        return own + self._rows.nbytes

    def beside(self, blocks: BlockTable) -> EdgeStore:
        """Return the same edges with the sums of ``blocks``, a copy of the block table."""
        one = copy.copy(self)
        one._blocks, one.counts = blocks, self.counts.copy()
        return one

    def upsert(
        self, kind: EdgeType, sources: Rows, targets: Rows, weights: Weights, now: float
    ) -> None:
        """Set the weight of edges ``sources[i] → targets[i]``, creating missing ones. Repeated
        pairs are allowed; the last weight wins.
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
        """Remove edges by their own rows; see ``at``."""
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
        """As ``BlockTable.tidying``."""
        yield from self._index.tidying(self.alive, self.size)
        yield from self.growing_ahead(self.size)

    def touching(self, among: Mask) -> EdgeList:
        """Return the edges at ``among``, bool ``[blocks.size]``; a scan."""
        rows = self.at(among, 0, self.size)
        return EdgeList(self.kind[rows], self.source[rows], self.target[rows], self.weight[rows])

    def of_kind(self, kind: EdgeType, part: slice = _ALL) -> Rows:
        """Return the rows of edges of one type, int32, in ``part`` of the store or in all of it."""
        start, end, _ = part.indices(self.size)
        mask = self.alive[start:end] & (self.kind[start:end] == int(kind))
        return (start + np.flatnonzero(mask)).astype(np.int32)

    def weight_between(self, kind: EdgeType, sources: Rows, targets: Rows) -> Weights:
        """Return the weight of each edge, float32 ``[n]``; 0 if there is none."""
        rows = self._index.find(_edge_keys(kind, sources, targets))
        return np.where(rows == NO_ROW, np.float32(0), self.weight[rows])

    def degree(self, kind: EdgeType, picked: Selection) -> npt.NDArray[np.uint16]:
        """Return the number of edges of a type at each block, uint16 ``[len(picked)]``."""
        if kind not in self._blocks.sums:
            return np.zeros(len(picked), dtype=np.uint16)
        return picked.of(self._blocks.sums[kind].degree)

    def weight_sum(self, kind: EdgeType, picked: Selection) -> Weights:
        """Return the weight sum of a type at each block, float32 ``[len(picked)]``."""
        if kind not in self._blocks.sums:
            return np.zeros(len(picked), dtype=np.float32)
        return picked.of(self._blocks.sums[kind].weight)

    def decay(self, kind: EdgeType, factor: float, floor: float, now: float, part: slice) -> None:
        """Multiply a type's weights in ``part``; remove those that fall below ``floor``."""
        rows = self.of_kind(kind, part)
        if rows.size == 0:
            return
        decayed = self.weight[rows] * np.float32(factor)
        faint = decayed < floor
        self._change_weights(kind, rows[~faint], decayed[~faint], now)
        self.remove(rows[faint])

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        live = np.flatnonzero(self.alive[: self.size])
        return {name: each[live] for name, each in self.views(self.size).items()}

    def load_columns(self, columns: dict[str, npt.NDArray[Any]]) -> None:
        """Fill an empty store with what ``columns()`` returned; sum up at the blocks."""
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
        """Recount a type's degree and weight sum at each block, ``[blocks.size]``."""
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
        """Return the edges from row ``start`` to ``end`` at blocks for which ``among``, bool
        ``[blocks.size]``, is true; int32.
        """
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


# All edges: those in the store, and those derived from columns.
#
# TEMPORAL and PREFIX_SHARE are derived from a block's parent and its walkers, SPILL_LINK from its
# tier bits: nothing else is stored for them.

Degrees = npt.NDArray[np.int64]

_COLDER = (Tier.WARM, Tier.COLD)


class AllEdges:
    """Answers questions about edges of all six types in the same way; changes none."""

    def __init__(self, blocks: BlockTable, stored: EdgeStore) -> None:
        self._blocks = blocks
        self._stored = stored

    def all(self) -> EdgeList:
        return self.touching(self._blocks.live_rows())

    def touching(self, rows: Rows) -> EdgeList:
        """Return the edges that have one of these blocks, or a copy of it, at an end; a scan."""
        blocks = self._blocks
        among = np.zeros(blocks.size + 1, dtype=np.bool_)  # the last one stands for NO_ROW
        among[rows] = True
        parent = blocks.parent[: blocks.size]
        linked = np.flatnonzero((parent != NO_ROW) & (among[:-1] | among[parent])).astype(np.int32)
        shared = linked[blocks.walkers[linked] >= 2]
        first = rows[_from_root(blocks.parent[rows], blocks.depth[rows], blocks.walkers[rows])]
        chained, walked = np.ones(len(linked), dtype=np.float32), blocks.walkers
        return EdgeList.joined(
            [
                EdgeList.of(EdgeType.TEMPORAL, parent[linked], linked, chained),
                EdgeList.of(EdgeType.PREFIX_SHARE, parent[shared], shared, walked[shared]),
                EdgeList.of(EdgeType.PREFIX_SHARE, first, first, walked[first]),
                *(self._copies(rows, tier) for tier in _COLDER),
                self._stored.touching(among[:-1]),
            ]
        )

    def counts(self) -> npt.NDArray[np.int64]:
        """Return the number of edges of each type, int64 ``[edge types]``."""
        blocks, counts = self._blocks, self._stored.counts.copy()
        rows = blocks.live_rows()
        first = _from_root(blocks.parent[rows], blocks.depth[rows], blocks.walkers[rows])
        counts[EdgeType.TEMPORAL] = blocks.children[rows].sum()
        counts[EdgeType.PREFIX_SHARE] = blocks.shared_children[rows].sum() + first.sum()
        counts[EdgeType.SPILL_LINK] = _colder(blocks.copies(Selection(blocks, rows))).sum()
        return counts

    def may_have(self, kind: EdgeType) -> bool:
        """Return whether there may be an edge of a type; False only if there is none."""
        if kind is EdgeType.SPILL_LINK:
            return self._blocks.had_copies
        return kind not in STORED or bool(self._stored.counts[kind])

    def degree(self, kind: EdgeType, picked: Selection) -> npt.NDArray[Any]:
        """Return the number of edges of a type at each block, int ``[len(picked)]``."""
        blocks = self._blocks
        match kind:
            case EdgeType.TEMPORAL:
                linked = picked.of(blocks.parent) != NO_ROW
                return np.asarray(picked.of(blocks.children) + linked)
            case EdgeType.PREFIX_SHARE:
                return picked.of(blocks.shared_children) + _is_shared(blocks, picked)
            case EdgeType.SPILL_LINK:
                return _colder(blocks.copies(picked))
            case _:
                return self._stored.degree(kind, picked)

    def weight(self, kind: EdgeType, picked: Selection) -> Weights:
        """Return the weight sum of a type at each block, float32 ``[len(picked)]``."""
        blocks = self._blocks
        match kind:
            case EdgeType.TEMPORAL | EdgeType.SPILL_LINK:  # each weighs 1
                return self.degree(kind, picked).astype(np.float32)
            case EdgeType.PREFIX_SHARE:
                own = picked.of(blocks.walkers) * _is_shared(blocks, picked)
                return (own + picked.of(blocks.children_walks)).astype(np.float32)
            case _:
                return self._stored.weight_sum(kind, picked)

    def _copies(self, rows: Rows, tier: Tier) -> EdgeList:
        held = np.bitwise_or.reduce(self._blocks.tiers[:, rows], axis=0) & int(tier)
        copied = rows[held != 0]
        ones = np.ones(len(copied), dtype=np.float32)
        copies = copied * 2 + int(tier is Tier.COLD)  # ids of COPY nodes
        return EdgeList.of(EdgeType.SPILL_LINK, copied, copies, ones)


def _is_shared(blocks: BlockTable, picked: Selection) -> Mask:
    """bool ``[len(picked)]``: whether a PREFIX_SHARE edge, of the root too, leads to each."""
    linked = (picked.of(blocks.parent) != NO_ROW) | (picked.of(blocks.depth) == 0)
    return np.asarray(linked & (picked.of(blocks.walkers) >= 2))


def _from_root(parent: Rows, depth: Rows, walkers: npt.NDArray[np.uint32]) -> Mask:
    """bool ``[n]``: whether a PREFIX_SHARE edge leads from the root to each of these blocks."""
    return np.asarray((parent == NO_ROW) & (depth == 0) & (walkers >= 2))


def _colder(held: npt.NDArray[np.uint8]) -> Degrees:
    """int64 ``[n]``: colder tiers with a copy, of the bits of all tiers that have one."""
    return sum(((held & int(tier)) != 0 for tier in _COLDER), np.zeros(len(held), dtype=np.int64))
