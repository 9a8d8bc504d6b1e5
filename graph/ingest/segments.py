"""Segments: what callers say about parts of a prompt, written to the blocks that hold them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from ..intents.leases import LeaseBounds, leasable
from ..memories.recalls import MemoryBook
from ..messages.events import RequestStarted, Segment
from ..tables.tables import Tables
from ..types import PROTECTED_LAYERS, Authority, Rows, SourceLayer
from .layers import LayerBook


class SegmentTagger:
    """Writes layers, names and memories of segments."""

    def __init__(self, tables: Tables, layers: LayerBook, counters: Counter[str]) -> None:
        self._tables = tables
        self._layers = layers
        self._counters = counters
        self._memories = MemoryBook(tables)

    def tag(self, engine: int, event: RequestStarted, rows: Rows, session: int, now: float) -> None:
        """Set layers from segments, the most precious last, so that it wins a block that
        two share."""
        if not event.segments:
            return
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
                self._counters["blocks_protected"] += self._begin_protection(covered, authority)
            if segment.name is not None:
                blocks = self._tables.blocks
                blocks.identity[covered] = self._tables.segment_names.intern(segment.name)
                blocks.chunk[covered] = np.minimum(np.arange(len(covered)), 65_535)
            if segment.pinned_s:
                self._lease(engine, covered, segment.pinned_s, now)
            if segment.memory_id is not None:
                self._memories.refer(covered, segment, session, now)

    def _begin_protection(self, rows: Rows, authority: Authority) -> int:
        """How many blocks are protected from this request on: those that it states, and those of
        which nobody said so if it is the second that walks them."""
        if authority is not Authority.INFERRED:
            return len(rows)
        return int(np.count_nonzero(self._tables.blocks.walkers[rows] == 2))

    def _lease(self, engine: int, rows: Rows, seconds: float, now: float) -> None:
        """Lease blocks that a request states, as far as leases may; a longer lease stands."""
        bounds = LeaseBounds()
        kept = leasable(self._tables, bounds, rows, now, arriving=engine) if len(rows) else rows
        until = now + min(seconds, bounds.longest_s)
        pinned = self._tables.blocks.for_writing("pinned_until")
        pinned[kept] = np.maximum(pinned[kept], until)


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
