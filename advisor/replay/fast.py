"""Hit rates without simulated time: LRU, Belady, no eviction, and libcachesim's algorithms."""

from __future__ import annotations

import importlib.util
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ...graph.compiled import core
from .trace import Ints, ReplayError, Trace

Places = npt.NDArray[np.int64]


def lru_hits(trace: Trace, capacity: int) -> Ints:
    """Return the prompt blocks matched by prefix, int32 ``[requests]``, one request after the
    other.

    This is exactly vLLM's order: a request's hits leave the free queue, its other blocks are taken
    from the queue's head, and when it ends all of them are freed tail first. ``simulator.simulate``
    with an ``LruOrder`` gives the same result, more slowly.
    """
    hits = np.zeros(len(trace), dtype=np.int32)
    core.lru(
        np.ascontiguousarray(trace.starts, dtype=np.int64),
        np.ascontiguousarray(trace.blocks, dtype=np.int32),
        np.ascontiguousarray(trace.matchable, dtype=np.int32),
        trace.num_blocks,
        capacity,
        hits,
    )
    return hits


def belady_hits(trace: Trace, capacity: int) -> Ints:
    """Return the matched prompt blocks, int32 ``[requests]``, if the block with the farthest next
    use is always evicted first.

    More than an engine can reach: a request's own blocks need no place here while it runs. What an
    engine that knows the future could do is ``arms.BeladyOrder``.
    """
    return belady(trace.starts, trace.blocks, trace.matchable, trace.prompts, capacity)


def belady(starts: Places, blocks: Ints, reach: Ints, prompts: Ints, capacity: int) -> Ints:
    """``belady_hits`` of requests in columns; see ``Trace``."""
    hits = np.zeros(len(reach), dtype=np.int32)
    depth = depths(starts, blocks)
    core.belady(
        np.ascontiguousarray(starts, dtype=np.int64),
        np.ascontiguousarray(blocks, dtype=np.int32),
        np.ascontiguousarray(reach, dtype=np.int32),
        len(depth),
        capacity,
        np.ascontiguousarray(prompts, dtype=np.int32),
        depth,
        hits,
    )
    return hits


def depths(starts: Places, blocks: Ints) -> Ints:
    """Return, for each block id, how many blocks precede it in its chain."""
    depth = np.zeros(int(blocks.max(initial=-1)) + 1, dtype=np.int32)
    depth[blocks] = np.arange(len(blocks)) - np.repeat(starts[:-1], np.diff(starts))
    return depth


def infinite_hits(trace: Trace) -> Ints:
    """int32 ``[requests]``: matched prompt blocks when nothing is ever evicted."""
    return belady_hits(trace, trace.num_blocks + 1)


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
"""Our name of a policy → libcachesim's class for it."""
_LEAST: Final = {"s3fifo": 10, "wtinylfu": 6}  # objects below which the library ends the process


def is_installed() -> bool:
    return importlib.util.find_spec("libcachesim") is not None


def library_hits(trace: Trace, capacity: int, policy: str) -> Ints:
    """Return the prompt blocks matched by one of ``ALGORITHMS``. Raises ReplayError."""
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
    """Return a libcachesim cache of ``capacity`` objects of size 1, and a request to query it."""
    try:
        import libcachesim
    except ImportError:
        raise ReplayError(
            f"policy {policy!r} needs libcachesim: pip install 'kvgraph[replay]'"
        ) from None
    if capacity < (least := _LEAST.get(policy, 1)):
        raise ReplayError(f"policy {policy!r} at {capacity} blocks: allowed: {least} or more")
    # log2 of its hash table's slots; the default of 24 costs 128 MB per cache.
    slots = max(12, capacity.bit_length() + 2)
    # W-TinyLFU's window is a hundredth of a pool; where that is no block, it would admit nothing.
    window = {"window_size": max(0.01, 1 / capacity)} if policy == "wtinylfu" else {}
    cache = getattr(libcachesim, ALGORITHMS[policy])(capacity, hashpower=slots, **window)
    request = libcachesim.Request()
    request.obj_size = 1
    return cache, request
