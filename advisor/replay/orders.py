"""Eviction orders to compare with, besides those of libcachesim."""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Final

import numpy as np

from .simulator import EvictionOrder
from .trace import Trace

# What a trace reveals about the future, and the eviction order that uses it.

NEVER: Final = 1 << 40  # stands for a request that never comes


class HeapOrder(EvictionOrder):
    """Evicts the free block with the smallest key; the latest ``_put`` of a block counts."""

    def __init__(self) -> None:
        self._free: dict[int, tuple[int, int, int]] = {}  # block → its entry of the heap
        self._heap: list[tuple[int, int, int]] = []

    def _put(self, block: int, *key: int) -> None:
        first, second = key
        self._free[block] = first, second, block
        heapq.heappush(self._heap, self._free[block])

    def reused(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            del self._free[block]

    def victims(self, count: int, now: float) -> list[int]:
        taken: list[int] = []
        while len(taken) < count:
            entry = heapq.heappop(self._heap)
            if self._free.get(entry[2]) == entry:
                del self._free[entry[2]]
                taken.append(entry[2])
        return taken


class BeladyOrder(HeapOrder):
    """Evicts the block whose next use is farthest, among equals the deepest.

    A block's parent is used whenever the block is, so this makes no block unreachable. No other
    order finds more if every request fits the pool; a refused request counts as a use here.
    """

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self._next = next_uses(trace)
        self._depth = depths(trace)

    def freed(self, request: int, blocks: Sequence[int], now: float) -> None:
        uses = self._next[request]
        for block in blocks:
            self._put(block, -uses[self._depth[block]], -self._depth[block])


def depths(trace: Trace) -> list[int]:
    """Return, for each block id, how many blocks precede it in its chain."""
    lengths = np.diff(trace.starts)
    depth = np.arange(len(trace.blocks)) - np.repeat(trace.starts[:-1], lengths)
    by_block = np.zeros(trace.num_blocks, dtype=np.int64)
    by_block[trace.blocks] = depth
    found: list[int] = by_block.tolist()
    return found


def next_uses(trace: Trace) -> list[list[int]]:
    """Return a list per request: for each block of its chain, the next request whose *prompt* has
    it.
    """
    coming = [NEVER] * trace.num_blocks
    prompts = trace.prompts.tolist()
    uses: list[list[int]] = []
    for request, chain in reversed(list(enumerate(trace.chains()))):
        uses.append([coming[block] for block in chain])
        for block in chain[: prompts[request]]:
            coming[block] = request
    uses.reverse()
    return uses


class LfuHistoryOrder(HeapOrder):
    """Evicts the least frequently used block, the oldest among equals. An evicted block keeps its
    count; libcachesim's LFU forgets it with its object, as most do.
    """

    def __init__(self) -> None:
        super().__init__()
        self._uses: Counter[int] = Counter()
        self._freed = 0

    def freed(self, request: int, blocks: Sequence[int], now: float) -> None:
        for block in blocks:
            self._uses[block] += 1
            self._freed += 1
            self._put(block, self._uses[block], self._freed)


_TTL_S: Final = 300.0  # chosen


class SessionTtlOrder(EvictionOrder):
    """Keeps blocks used by a session with two or more turns for five minutes after its last turn.

    Other blocks are evicted first, those free longest before the rest; among the kept ones, the
    oldest. With the same time to live for every session, it would be LRU.
    """

    def __init__(self, trace: Trace) -> None:
        self._turns = trace.turns().tolist()
        self._kept: OrderedDict[int, float] = OrderedDict()
        self._plain: OrderedDict[int, None] = OrderedDict()

    def freed(self, request: int, blocks: Sequence[int], now: float) -> None:
        if self._turns[request]:
            self._kept.update(dict.fromkeys(blocks, now + _TTL_S))
        else:
            self._plain.update(dict.fromkeys(blocks))

    def reused(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if block in self._kept:
                del self._kept[block]
            else:
                del self._plain[block]

    def victims(self, count: int, now: float) -> list[int]:
        return [self._victim(now) for _ in range(count)]

    def _victim(self, now: float) -> int:
        oldest = next(iter(self._kept.values()), now)
        if self._plain and oldest >= now:
            return self._plain.popitem(last=False)[0]
        return self._kept.popitem(last=False)[0]
