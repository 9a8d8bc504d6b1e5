"""Segments: what callers say about parts of a prompt, written to the blocks that hold them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

import numpy as np

from ..messages.events import RequestStarted, Segment
from ..tables.tables import Tables
from ..types import NO_ROW, PROTECTED_LAYERS, Authority, EdgeType, Rows, SourceLayer
from .layers import LayerBook

_MEMORIES_A_BLOCK: Final = 4  # MEMORY_REF edges per block; more add nothing. Chosen


class SegmentTagger:
    """Writes layers, names and memories of segments."""

    def __init__(self, tables: Tables, layers: LayerBook, counters: Counter[str]) -> None:
        self._tables = tables
        self._layers = layers
        self._counters = counters

    def tag(self, event: RequestStarted, rows: Rows, session: int, now: float) -> None:
        """Set layers from segments, the most precious last, so that it wins a block that
        two share."""
        size = event.block_size
        segments = _affordable(event.segments, len(rows), size)
        if len(segments) < len(event.segments):
            self._counters["segments_left_out"] += len(event.segments) - len(segments)
        for segment in segments:
            first, last = segment.start // size, -(-segment.end // size)
            covered = rows[first:last] if segment.end > segment.start else rows[:0]
            layer, authority = SourceLayer(segment.layer), Authority(segment.authority)
            self._layers.state(covered, layer, segment.importance, authority, session)
            if segment.layer in PROTECTED_LAYERS:
                self._counters["blocks_protected"] += len(covered)
            if segment.name is not None:
                blocks = self._tables.blocks
                blocks.identity[covered] = self._tables.segment_names.intern(segment.name)
                blocks.chunk[covered] = np.minimum(np.arange(len(covered)), 65_535)
            if segment.memory_id is not None:
                self._refer_to_memory(covered, segment, now)

    def _refer_to_memory(self, rows: Rows, segment: Segment, now: float) -> None:
        memory = self._tables.memories.intern(segment.memory_id or "")
        known = self._tables.blocks.sums_of(EdgeType.MEMORY_REF).degree[rows]
        rows = rows[known < _MEMORIES_A_BLOCK]
        if memory == NO_ROW or not len(rows):
            return
        targets = np.full(len(rows), memory, dtype=np.int32)
        weights = self._tables.blocks.importance[rows].astype(np.float32)
        self._tables.edges.upsert(EdgeType.MEMORY_REF, rows, targets, weights, now)


def _affordable(segments: Sequence[Segment], blocks: int, size: int) -> list[Segment]:
    """The segments that a request of so many blocks may have, the least precious first.

    In sum they cover each block twice at most, and share one more block each with a neighbour:
    otherwise a thousand overlapping segments would write every block a thousand times.
    """
    room, kept = 2 * blocks + len(segments), []
    for segment in sorted(segments, key=lambda each: each.layer):
        covered = min(-(-segment.end // size), blocks) - segment.start // size
        if covered <= room:
            room -= max(covered, 0)
            kept.append(segment)
    return sorted(kept, key=lambda each: -each.layer)
