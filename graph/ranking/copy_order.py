"""``CopyOrder``: which copies in host memory are given up first, live and in the replay lab."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class CopyOrder(Generic[K]):
    """Orders copies by the names of their blocks.

    First go copies of blocks in use: these bytes are stored twice, and can be copied again when the
    block is about to be lost. Then go those that advice names, then the others, longest lost first.
    So pool and memory hold different blocks, together as many as both have room for.

    Args:
        plain: Order by least recent use, whatever is in use and whatever is advised.
    """

    def __init__(self, plain: bool = False) -> None:
        self._plain = plain
        self._twice: OrderedDict[K, None] = OrderedDict()
        self._once: OrderedDict[K, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._twice) + len(self._once)

    def __contains__(self, block: object) -> bool:
        return block in self._once or block in self._twice

    def __iter__(self) -> Iterator[K]:
        return chain(self._twice, self._once)

    def add(self, block: K) -> None:
        """Add the copy of a block that is about to be lost, or was lost just now."""
        self._once[block] = None

    def discard(self, block: K) -> None:
        """Remove a copy."""
        self._once.pop(block, None)
        self._twice.pop(block, None)

    def used(self, blocks: Sequence[K]) -> None:
        """Note that a request uses this chain in the pool; of its copies, the tail's go before the
        head's."""
        for block in reversed(blocks):
            if block in self:
                self.discard(block)
                (self._once if self._plain else self._twice)[block] = None

    def leaves(self, block: K) -> None:
        """Note that no request uses this block, and that the pool lost it, or is about to.

        Without this note, copies of such blocks would replace each other without end.
        """
        if block in self:
            self.discard(block)
            self._once[block] = None

    def stands_twice(self, block: K) -> bool:
        """Whether the block is in use in the pool."""
        return block in self._twice

    def holds_twice(self) -> bool:
        """Whether the block of any copy is in use in the pool."""
        return bool(self._twice)

    def first(self, advised: Iterable[K] = ()) -> Iterator[K]:
        """Names in the order in which copies go; a name may come twice, and one of ``advised`` may
        have no copy."""
        return chain(self._twice, () if self._plain else advised, self._once)
