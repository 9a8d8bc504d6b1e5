"""``returned``: blocks that a step evicted, and cached anew for a request that missed them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from ...keys import key_of
from .tap import Cached


def returned(
    cached: Sequence[Cached], evicted: Sequence[int], gone: Sequence[int], scale: int
) -> Iterator[Cached]:
    """Runs of evicted blocks that are not gone, that are among ``cached``.

    Args:
        evicted, gone: Keys.
        scale: Hashes of a request per block.
    """
    if len(gone) == len(evicted):
        return
    back = set(evicted).difference(gone)
    for each in cached:
        yield from _runs(each, back, scale)


def _runs(cached: Cached, keys: set[int], scale: int) -> Iterator[Cached]:
    request, blocks, first, end = cached
    hashes = request.block_hashes[scale * (first + 1) - 1 : scale * end : scale]
    told = enumerate((key_of(each) in keys for each in hashes), first)
    for is_back, run in groupby(told, key=lambda each: each[1]):
        if is_back:
            places = [place for place, _ in run]
            yield request, blocks, places[0], places[-1] + 1
