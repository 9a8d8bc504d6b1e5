"""Upper bounds of hit rates: what no policy can exceed."""

from __future__ import annotations

import heapq
import importlib.util
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from .orders import NEVER, depths, next_uses
from .trace import Ints, ReplayError, Trace

# vLLM's own eviction, without service times: the fast path.


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


# The literature's eviction algorithms, through libcachesim, with prefix matching on top.
#
# A block is an object of size 1. Each block of a chain is one request to the cache, tail first
# as in vLLM's free queue; a prompt matches the blocks from its start that are cached. The
# algorithms do not know chains, so they may hold a block whose parent is gone, which is then no
# hit.
#
# Not every algorithm of libcachesim 0.3.5 does what its name says (its LRB and 3L-Cache gave
# LRU's figures), so a table in which two columns are equal says so. LFU and SIEVE do give equal
# figures on traces that are mostly scans; plain implementations of both agree with the library
# there.

ALGORITHMS: Final = {
    "lfu": "LFU",
    "arc": "ARC",
    "s3fifo": "S3FIFO",
    "sieve": "Sieve",
    "wtinylfu": "WTinyLFU",
    "gdsf": "GDSF",
    "lirs": "LIRS",
    "lecar": "LeCaR",
    "2q": "TwoQ",
}
"""Our name of a policy → the class of libcachesim that is it."""


def is_installed() -> bool:
    """Whether libcachesim can be imported."""
    return importlib.util.find_spec("libcachesim") is not None


def library_hits(trace: Trace, capacity: int, policy: str) -> Ints:
    """int32 ``[requests]``: matched prompt blocks under one of ``ALGORITHMS``.

    Raises:
        ReplayError: libcachesim is not installed.
    """
    cache, request = new_cache(policy, capacity)
    limits = trace.matchable.tolist()
    hits = np.zeros(len(trace), dtype=np.int32)
    find, get = cache.find, cache.get
    for number, chain in enumerate(trace.chains()):
        for block in chain[: limits[number]]:
            request.obj_id = block
            if find(request, False) is None:
                break
            hits[number] += 1
        for block in reversed(chain):
            request.obj_id = block
            get(request)
    return hits


def new_cache(policy: str, capacity: int) -> tuple[Any, Any]:
    """A libcachesim cache of ``capacity`` objects of size 1, and a request to ask it with."""
    try:
        import libcachesim
    except ImportError:
        raise ReplayError(
            f"policy {policy!r} needs libcachesim: pip install 'kvgraph[replay]'"
        ) from None
    cache = getattr(libcachesim, ALGORITHMS[policy])(capacity, hashpower=_hash_power(capacity))
    request = libcachesim.Request()
    request.obj_size = 1
    return cache, request


def _hash_power(capacity: int) -> int:
    """log2 of its hash table's slots; the default of 24 costs 128 MB per cache."""
    return max(12, capacity.bit_length() + 2)
