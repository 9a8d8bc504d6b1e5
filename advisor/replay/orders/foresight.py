"""What a trace tells about the future, and the eviction order that knows it."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Final

import numpy as np

from ..traces.trace import Trace
from .orders import EvictionOrder

NEVER: Final = 1 << 40
"""Stands for a request that does not come."""


class BeladyOrder(EvictionOrder):
    """Evicts the block whose next use is farthest, among equals the deepest.

    A block's parent is used whenever the block is, so this leaves no block unreachable. No other
    order finds more where every request fits the pool; one that is refused counts as a use here.
    """

    def __init__(self, trace: Trace) -> None:
        self._next = next_uses(trace)
        self._depth = depths(trace)
        self._due: dict[int, int] = {}  # free block → request that uses it next
        self._heap: list[tuple[int, int, int]] = []

    def freed(self, request: int, blocks: Sequence[int], now: float) -> None:
        uses = self._next[request]
        for block in blocks:
            due = uses[self._depth[block]]
            self._due[block] = due
            heapq.heappush(self._heap, (-due, -self._depth[block], block))

    def reused(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            del self._due[block]

    def victims(self, count: int, now: float) -> list[int]:
        taken: list[int] = []
        while len(taken) < count:
            due, _, block = heapq.heappop(self._heap)
            if self._due.get(block) == -due:
                del self._due[block]
                taken.append(block)
        return taken


def depths(trace: Trace) -> list[int]:
    """How many blocks stand before each block id in its chain."""
    lengths = np.diff(trace.starts)
    depth = np.arange(len(trace.blocks)) - np.repeat(trace.starts[:-1], lengths)
    by_block = np.zeros(trace.num_blocks, dtype=np.int64)
    by_block[trace.blocks] = depth
    found: list[int] = by_block.tolist()
    return found


def next_uses(trace: Trace) -> list[list[int]]:
    """Per request a list: for each block of its chain, the next request whose *prompt* has it."""
    coming = [NEVER] * trace.num_blocks
    prompts = trace.prompts.tolist()
    uses: list[list[int]] = []
    for request, chain in reversed(list(enumerate(trace.chains()))):
        uses.append([coming[block] for block in chain])
        for block in chain[: prompts[request]]:
            coming[block] = request
    uses.reverse()
    return uses
