"""Upper bounds of hit rates: what no policy can exceed."""

from __future__ import annotations

import heapq

import numpy as np

from ..orders.foresight import NEVER, depths, next_uses
from ..traces.trace import Ints, Trace
from .lru import lru_matches


def belady_hits(trace: Trace, capacity: int) -> Ints:
    """int32 ``[requests]``: matched prompt blocks if the block with the farthest next use always
    goes first.

    More than an engine can reach: a request's own blocks need no place here while it runs. What an
    engine that knows the future could do is ``foresight.BeladyOrder``.
    """
    uses, depth = next_uses(trace), depths(trace)
    limits = trace.matchable.tolist()
    hits = np.zeros(len(trace), dtype=np.int32)
    due: dict[int, int] = {}  # cached block → request that uses it next
    heap: list[tuple[int, int, int]] = []
    for request, chain in enumerate(trace.chains()):
        hits[request] = _matched(chain[: limits[request]], due)
        for block, coming in zip(chain, uses[request], strict=True):
            if coming == NEVER:
                due.pop(block, None)
            else:
                due[block] = coming
                heapq.heappush(heap, (-coming, -depth[block], block))
        while len(due) > capacity:
            coming, _, block = heapq.heappop(heap)
            if due.get(block) == -coming:
                del due[block]
    return hits


def infinite_hits(trace: Trace) -> Ints:
    """int32 ``[requests]``: matched prompt blocks when nothing is ever evicted."""
    return belady_hits(trace, trace.num_blocks + 1)


def infinite_for_multi_turn_hits(trace: Trace, capacity: int) -> Ints:
    """int32 ``[requests]``: matched prompt blocks if sessions with several turns took no room, and
    the others were under LRU.

    What protecting every returning session could gain at most on top of LRU.
    """
    exempt = _blocks_of_multi_turn(trace)
    chains, limits = trace.chains(), trace.matchable
    # Who comes back walked a block's parents too, so the exempt blocks of a chain are its first.
    heads = np.array([sum(exempt[block] for block in chain) for chain in chains])
    rests = [chain[head:] for chain, head in zip(chains, heads.tolist(), strict=True)]
    behind = lru_matches(rests, np.maximum(limits - heads, 0).tolist(), capacity)
    first = np.minimum(infinite_hits(trace), heads)
    return np.where(first == heads, np.minimum(heads + behind, limits), first).astype(np.int32)


def _matched(chain: list[int], cached: dict[int, int]) -> int:
    for count, block in enumerate(chain):
        if block not in cached:
            return count
    return len(chain)


def _blocks_of_multi_turn(trace: Trace) -> list[bool]:
    several = (np.bincount(trace.session) > 1)[trace.session]
    exempt = np.zeros(trace.num_blocks, dtype=np.bool_)
    exempt[trace.blocks[np.repeat(several, np.diff(trace.starts))]] = True
    marks: list[bool] = exempt.tolist()
    return marks
