"""Eviction orders: which of the free blocks goes next."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence


class EvictionOrder(ABC):
    """An instance's free cached blocks, and the order in which it loses them.

    The instance reports what happens, in the engine's order; ``take`` and ``freed`` keep the set.
    """

    def serves(self, capacity: int) -> None:  # noqa: B027
        """Note how many blocks the instance has."""

    @abstractmethod
    def freed(self, request: int, blocks: Sequence[int], now: float) -> None:
        """Note that these blocks became free, in this order (tail first); ``request`` used them
        last."""

    @abstractmethod
    def reused(self, blocks: Sequence[int]) -> None:
        """Note that these free blocks were matched and are in use again."""

    @abstractmethod
    def victims(self, count: int, now: float) -> list[int]:
        """Take ``count`` free blocks, to be evicted now."""

    def started(self, request: int, hit: int, new: Sequence[int], now: float) -> None:  # noqa: B027
        """Note that a request was scheduled: its first ``hit`` blocks were matched, ``new``
        allocated."""

    def evicted(self, blocks: Sequence[int], now: float) -> None:  # noqa: B027
        """Note that the blocks which ``victims`` gave are gone."""

    def worth_copying(self, blocks: Sequence[int]) -> Sequence[int]:
        """Those of the blocks just evicted that are worth a copy in a tier below."""
        return blocks

    def copied(self, made: Sequence[int], gone: Sequence[int], now: float) -> None:  # noqa: B027
        """Note that the tier below holds copies of the blocks ``made``, and none of ``gone`` any
        more."""

    def finished(self, request: int, now: float) -> None:  # noqa: B027
        """Note that a request ended, and that its blocks are about to be freed."""


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
