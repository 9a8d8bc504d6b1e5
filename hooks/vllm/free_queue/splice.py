"""Moves blocks within vLLM's free queue."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


def move_behind(place: KVCacheBlock, blocks: Iterable[KVCacheBlock]) -> None:
    """Move free ``blocks`` to right behind ``place``, in their order.

    The queue links its blocks in both directions and counts them. Each block is relinked by itself,
    so that none is ever outside the queue and the count stays right, wherever this ends.

    Args:
        place: A block of the queue, or its fake head; none of ``blocks``.
    """
    for block in blocks:
        before, after = block.prev_free_block, block.next_free_block
        assert before is not None
        assert after is not None
        before.next_free_block, after.prev_free_block = after, before
        behind = place.next_free_block
        assert behind is not None
        block.prev_free_block, block.next_free_block = place, behind
        place.next_free_block = behind.prev_free_block = block
        place = block
