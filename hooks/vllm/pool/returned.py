"""``returned``: blocks that a step evicted, and cached anew for a request that missed them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from ...keys import key_of
from .tap import CachedRun


def returned(
    cached: Sequence[CachedRun], evicted: Sequence[int], gone: Sequence[int], scale: int
) -> list[CachedRun]:
    """Runs of evicted blocks that are not gone, as they were cached last.

    Args:
        cached: What the step cached, in order.
        evicted, gone: Keys.
        scale: Hashes of a request per block.
    """
    if len(gone) == len(evicted):
        return []
    back, runs = set(evicted).difference(gone), list[CachedRun]()
    for each in reversed(cached):
        if not back:
            break
        runs += _runs(each, back, scale)
    return runs


def _runs(cached: CachedRun, back: set[int], scale: int) -> Iterator[CachedRun]:
    """Runs of blocks whose keys are among ``back``, which loses them."""
    hashes, blocks, first, end = cached
    keys = map(key_of, hashes[scale * (first + 1) - 1 : scale * end : scale])
    for is_back, run in groupby(enumerate(keys, first), key=lambda each: each[1] in back):
        if is_back:
            places = dict(run)
            back.difference_update(places.values())
            yield hashes, blocks, min(places), max(places) + 1
