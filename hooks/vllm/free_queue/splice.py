"""Moves blocks within vLLM's free queue."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


def move_behind(place: KVCacheBlock, blocks: Iterable[KVCacheBlock]) -> None:
    """Move free ``blocks`` to right behind ``place``, in their order.

    The queue links its blocks in both directions and counts them. Blocks that follow one another
    already are moved as one, and those that stand there already are left alone. The count stays
    right wherever this ends, and only what is being moved is outside the queue meanwhile.

    Args:
        place: A block of the queue, or its fake head; none of ``blocks``.
        blocks: Each once.
    """
    rest = iter(blocks)
    first = last = next(rest, None)
    if first is None or last is None:
        return
    for block in chain(rest, (None,)):  # a free block is followed by one, or by the fake tail
        if last.next_free_block is block:
            last = block
            continue
        before = first.prev_free_block
        if before is not place:
            after, behind = last.next_free_block, place.next_free_block
            assert before is not None
            assert after is not None
            assert behind is not None
            before.next_free_block, after.prev_free_block = after, before
            first.prev_free_block, last.next_free_block = place, behind
            place.next_free_block, behind.prev_free_block = first, last
        place = last
        first = last = block
