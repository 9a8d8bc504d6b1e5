"""Eviction orders: who of the free blocks goes next."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence


class EvictionOrder(ABC):
    """An instance's free cached blocks, and which of them it loses first.

    The instance says what happens, in the engine's order; ``take`` and ``freed`` keep the set.
    """

    def serves(self, capacity: int) -> None:  # noqa: B027
        """The instance whose order this is has so many blocks."""

    @abstractmethod
    def freed(self, request: int, blocks: Sequence[int], now: float) -> None:
        """These blocks became free, in this order (tail first); ``request`` used them last."""

    @abstractmethod
    def reused(self, blocks: Sequence[int]) -> None:
        """These free blocks were matched and are in use again."""

    @abstractmethod
    def victims(self, count: int, now: float) -> list[int]:
        """Take ``count`` free blocks, to be evicted now."""

    def started(self, request: int, hit: int, new: Sequence[int], now: float) -> None:  # noqa: B027
        """A request was scheduled: its first ``hit`` blocks were matched, ``new`` allocated."""

    def evicted(self, blocks: Sequence[int], now: float) -> None:  # noqa: B027
        """What ``victims`` gave is gone."""

    def copied(self, made: Sequence[int], gone: Sequence[int], now: float) -> None:  # noqa: B027
        """The tier below holds copies of blocks that it ``made``, and then none of ``gone``."""

    def finished(self, request: int, now: float) -> None:  # noqa: B027
        """A request ended; its blocks are about to be freed."""


class LruOrder(EvictionOrder):
    """vLLM's free queue: the longest free goes first."""

    def __init__(self) -> None:
        self._free: OrderedDict[int, None] = OrderedDict()

    def freed(self, request: int, blocks: Sequence[int], now: float) -> None:
        self._free.update(dict.fromkeys(blocks))

    def reused(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            del self._free[block]

    def victims(self, count: int, now: float) -> list[int]:
        pop = self._free.popitem
        return [pop(last=False)[0] for _ in range(count)]
