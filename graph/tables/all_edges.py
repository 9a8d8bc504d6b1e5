"""All edges: those of the store, and those that follow from columns.

TEMPORAL and PREFIX_SHARE follow from a block's parent and its walkers, SPILL_LINK from its tier
bits: these columns are all that is stored of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..types import NO_ROW, EdgeType, Rows, Tier
from .blocks import BlockTable, Selection
from .edge_list import EdgeList, copy_id
from .edges import STORED, EdgeStore

Mask = npt.NDArray[np.bool_]
Degrees = npt.NDArray[np.int64]
Weights = npt.NDArray[np.float32]

_COLDER = (Tier.WARM, Tier.COLD)


class AllEdges:
    """Answers for edges of all six types alike; changes none."""

    def __init__(self, blocks: BlockTable, stored: EdgeStore) -> None:
        self._blocks = blocks
        self._stored = stored

    def all(self) -> EdgeList:
        """Every edge."""
        return self.touching(self._blocks.live_rows())

    def touching(self, rows: Rows) -> EdgeList:
        """The edges with one of these blocks (or a copy of it) at an end; a scan."""
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
        """int64 ``[edge types]``: how many there are of each."""
        blocks, counts = self._blocks, self._stored.counts.copy()
        rows = blocks.live_rows()
        first = _from_root(blocks.parent[rows], blocks.depth[rows], blocks.walkers[rows])
        counts[EdgeType.TEMPORAL] = blocks.children[rows].sum()
        counts[EdgeType.PREFIX_SHARE] = blocks.shared_children[rows].sum() + first.sum()
        counts[EdgeType.SPILL_LINK] = _copies_of(blocks.tiers[:, rows]).sum()
        return counts

    def may_have(self, kind: EdgeType) -> bool:
        """Whether there may be an edge of a type; False only if there is none."""
        if kind is EdgeType.SPILL_LINK:
            return self._blocks.had_copies
        return kind not in STORED or bool(self._stored.counts[kind])

    def degree(self, kind: EdgeType, picked: Selection) -> npt.NDArray[Any]:
        """int ``[len(picked)]``: edges of a type at each of these blocks."""
        blocks = self._blocks
        match kind:
            case EdgeType.TEMPORAL:
                linked = picked.of(blocks.parent) != NO_ROW
                return np.asarray(picked.of(blocks.children) + linked)
            case EdgeType.PREFIX_SHARE:
                return picked.of(blocks.shared_children) + _is_shared(blocks, picked)
            case EdgeType.SPILL_LINK:
                return _copies_of(picked.of_engines(blocks.tiers))
            case _:
                return self._stored.degree(kind, picked)

    def weight(self, kind: EdgeType, picked: Selection) -> Weights:
        """float32 ``[len(picked)]``: their weights, summed."""
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
        return EdgeList.of(EdgeType.SPILL_LINK, copied, copy_id(copied, tier), ones)


def _is_shared(blocks: BlockTable, picked: Selection) -> Mask:
    """bool ``[len(picked)]``: whether a PREFIX_SHARE edge leads to each, including edges from the
    root."""
    linked = (picked.of(blocks.parent) != NO_ROW) | (picked.of(blocks.depth) == 0)
    return np.asarray(linked & (picked.of(blocks.walkers) >= 2))


def _from_root(parent: Rows, depth: Rows, walkers: npt.NDArray[np.uint32]) -> Mask:
    """bool ``[n]``: whether a PREFIX_SHARE edge leads from the root to each of these blocks."""
    return np.asarray((parent == NO_ROW) & (depth == 0) & (walkers >= 2))


def _copies_of(tiers: npt.NDArray[np.uint8]) -> Degrees:
    """int64 ``[n]``: colder tiers with a copy, of ``tiers``, ``[engines, n]``."""
    held = np.bitwise_or.reduce(tiers, axis=0)
    return sum(((held & int(tier)) != 0 for tier in _COLDER), np.zeros(len(held), dtype=np.int64))
