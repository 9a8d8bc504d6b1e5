"""What an operation addresses in a paged memory: whole blocks, or single token slots."""

from __future__ import annotations

from typing import NamedTuple

from ..tensors import Tensor
from .layout import KvLayout, PagedKv


class Blocks(NamedTuple):
    """Some blocks of one memory, in the order in which they are moved.

    Attributes:
        kv: The memory: an engine's cache, or an arena, whose blocks are its records.
        numbers: int64 [n], block numbers; no number twice where blocks are written.
    """

    kv: PagedKv
    numbers: Tensor

    @property
    def layout(self) -> KvLayout:
        """The layout of the memory."""
        return self.kv.layout


class SlotMap(NamedTuple):
    """Which token slot goes to which, and how far its position moves.

    Attributes:
        source: int64 [T], slots of the source memory; a pair with a negative slot is skipped.
        target: int64 [T], slots of the target memory; no slot twice.
        delta: int64 [T], Δ: new position minus old, in tokens.
    """

    source: Tensor
    target: Tensor
    delta: Tensor

    def kept(self) -> SlotMap:
        """The pairs of which neither slot is negative."""
        keep = (self.source >= 0) & (self.target >= 0)
        return SlotMap(*(column[keep] for column in self))

    @property
    def on_gpu(self) -> bool:
        """Whether a column is in a GPU's memory, where looking at it would wait for the device."""
        return any(column.is_cuda for column in self)
