"""vLLM's own eviction, without service times: the fast path."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from ..traces.trace import Ints, Trace


def lru_hits(trace: Trace, capacity: int) -> Ints:
    """int32 ``[requests]``: prompt blocks matched by prefix, one request after the other.

    vLLM's order exactly: a request's hits leave the free queue, its other blocks take the queue's
    head, and when it ends all of them come back tail first. ``simulator.simulate`` with an
    ``LruOrder`` says the same, slower.
    """
    return lru_matches(trace.chains(), trace.matchable.tolist(), capacity)


def lru_matches(chains: Sequence[Sequence[int]], limits: Sequence[int], capacity: int) -> Ints:
    """``lru_hits`` of plain chains, of which a match may cover at most ``limits`` blocks."""
    hits = np.empty(len(chains), dtype=np.int32)
    cache: OrderedDict[int, None] = OrderedDict()
    room = capacity
    for request, chain in enumerate(chains):
        resident = _resident(chain, cache)
        hits[request] = min(resident, limits[request])
        if len(chain) > capacity:  # vLLM refuses what can never fit
            hits[request] = 0
            continue
        room -= len(chain) - resident
        if room < 0:
            _evict(cache, chain[:resident], -room)
            room = 0
        touch = cache.move_to_end
        cache.update(dict.fromkeys(reversed(chain[resident:])))
        for block in reversed(chain[:resident]):
            touch(block)
    return hits


def _resident(chain: Sequence[int], cache: OrderedDict[int, None]) -> int:
    """How many blocks of a chain are cached: under LRU they are always its first ones."""
    count = 0
    for block in chain:
        if block not in cache:
            break
        count += 1
    return count


def _evict(cache: OrderedDict[int, None], kept: Sequence[int], count: int) -> None:
    pinned = set(kept)
    while count:
        block, _ = cache.popitem(last=False)
        if block in pinned:
            cache[block] = None  # it is about to be touched anyway
        else:
            count -= 1
