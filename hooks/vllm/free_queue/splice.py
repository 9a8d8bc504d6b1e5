"""Moves blocks within vLLM's free queue."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, compress, count, islice
from operator import attrgetter, is_not
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

_next_of: Final = attrgetter("next_free_block")


def move_behind(place: KVCacheBlock, blocks: Sequence[KVCacheBlock]) -> int:
    """Move free ``blocks`` to right behind ``place``, in their order; returns how many that moved.

    The queue links its blocks in both directions and counts them. Blocks that follow one another
    already are moved as one, and those that stand there already are left alone. The count stays
    right wherever this ends, and only what is being moved is outside the queue meanwhile.

    Args:
        place: A block of the queue, or its fake head; none of ``blocks``.
        blocks: Each once.
    """
    if not blocks:
        return 0
    moved = 0
    apart = map(is_not, map(_next_of, blocks), islice(blocks, 1, None))
    ends, start = list(compress(count(1), apart)), 0
    for end in chain(ends, (len(blocks),)):
        first, last = blocks[start], blocks[end - 1]
        before = first.prev_free_block
        if before is not place:
            after, behind = last.next_free_block, place.next_free_block
            assert before is not None
            assert after is not None
            assert behind is not None
            before.next_free_block, after.prev_free_block = after, before
            first.prev_free_block, last.next_free_block = place, behind
            place.next_free_block, behind.prev_free_block = first, last
            moved += end - start
        place, start = last, end
    return moved
