"""Edges as a reader sees them, whether they are stored or follow from columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ..types import EdgeType, Rows, Tier

Weights = npt.NDArray[np.float32]

BLOCK_TO_BLOCK: Final = frozenset(
    {EdgeType.PREFIX_SHARE, EdgeType.CO_ATTEND, EdgeType.SEMANTIC, EdgeType.TEMPORAL}
)


def copy_id(rows: Rows, tier: Tier) -> Rows:
    """The COPY node of each block in a colder tier."""
    return rows * 2 + int(tier is Tier.COLD)


class Edge(NamedTuple):
    """One edge; see ``EdgeList``."""

    kind: EdgeType
    source: int
    target: int
    weight: float

    @property
    def is_from_root(self) -> bool:
        """Whether it is the link from the root, the empty prefix, to the first of a chain."""
        return self.kind is EdgeType.PREFIX_SHARE and self.source == self.target


@dataclass(frozen=True, slots=True, eq=False)
class EdgeList:
    """Some edges, one array per property.

    A node id is a block row, except as the target of SPILL_LINK (a copy id) and MEMORY_REF (an
    interned memory name). A PREFIX_SHARE edge from a block to itself is the link from the root, the
    empty prefix, to the first block of a chain.

    Attributes:
        kind: uint8 ``[n]``, types.EdgeType.
        source, target: int32 ``[n]``, node ids.
        weight: float32 ``[n]``.
    """

    kind: npt.NDArray[np.uint8]
    source: Rows
    target: Rows
    weight: Weights

    @classmethod
    def of(cls, kind: EdgeType, source: Rows, target: Rows, weight: npt.NDArray[Any]) -> EdgeList:
        """Edges of one type."""
        kinds = np.full(len(source), int(kind), dtype=np.uint8)
        return cls(kinds, source, target, weight.astype(np.float32, copy=False))

    @classmethod
    def joined(cls, parts: Sequence[EdgeList]) -> EdgeList:
        """All of several lists, at least one."""
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

    def where(self, mask: npt.NDArray[np.bool_]) -> EdgeList:
        """Those where ``mask``, bool ``[n]``, is true."""
        return EdgeList(self.kind[mask], self.source[mask], self.target[mask], self.weight[mask])

    def between_blocks(self) -> npt.NDArray[np.bool_]:
        """bool ``[n]``: where the target, too, is a block row."""
        return np.isin(self.kind, [int(kind) for kind in BLOCK_TO_BLOCK])
