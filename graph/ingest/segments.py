"""Applies segments, which state the role of parts of a prompt, to the blocks that hold them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final

import numpy as np
import numpy.typing as npt

from ..explain import blocks_of_memory
from ..intents import LONGEST_S, leasable
from ..tables.sessions import MemoryFacts
from ..tables.tables import Tables
from ..types import (
    DEFAULT_IMPORTANCE,
    NO_ROW,
    PROTECTED_LAYERS,
    Authority,
    EdgeType,
    Rows,
    SessionState,
    SourceLayer,
)
from ..wire.events import RequestStarted, Segment


class LayerBook:
    """Sets layers and importances of blocks.

    An operator's statement takes precedence over a caller's, and a caller's over inference. Among
    equals, the most precious layer stays while a session that stated it lives; until then only the
    same tenant may lower it.
    """

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    def state(
        self,
        rows: Rows,
        layer: SourceLayer,
        importance: float | None,
        authority: Authority,
        session: int,
    ) -> None:
        """Set the layer that ``session`` states for these block rows; ``NO_ROW``: no session."""
        if not len(rows):
            return
        blocks = self._tables.blocks
        number, rank = int(layer), int(authority)  # numpy is slow with an enumeration's
        if authority is Authority.INFERRED:  # seen again: a stated importance stays
            rows = rows[blocks.layer[rows] != number]
        worth = np.float32(DEFAULT_IMPORTANCE[number] if importance is None else importance)
        rows = rows[self._may_state(rows, number, worth, rank, session)]
        blocks.layer[rows] = number
        blocks.importance[rows] = worth
        blocks.stated[rows] = rank
        blocks.raised_by[rows] = session

    def _may_state(
        self,
        rows: Rows,
        layer: int,
        worth: np.float32,
        authority: int,
        session: int,
    ) -> npt.NDArray[np.bool_]:
        blocks = self._tables.blocks
        stated, raised_by = blocks.stated[rows], blocks.raised_by[rows]
        if (raised_by == NO_ROW).all():  # as always where nothing is stated
            return np.asarray(stated <= authority)
        before = blocks.layer[rows]
        less = (before < layer) | ((before == layer) & (blocks.importance[rows] > worth))
        same = (before == layer) & (blocks.importance[rows] == worth)  # who raised it, did
        holds = (stated == authority) & (less | same) & ~self._yields(raised_by, session)
        return np.asarray((stated <= authority) & ~holds)

    def _yields(self, raised_by: Rows, session: int) -> npt.NDArray[np.bool_]:
        """Whether ``session`` may override statements: of its own tenant, or ended sessions."""
        sessions = self._tables.sessions
        gone = (raised_by == NO_ROW) | (sessions.state[raised_by] == SessionState.ENDED)
        tenant = sessions.tenant[session] if session != NO_ROW else NO_ROW
        return np.asarray(gone | (sessions.tenant[raised_by] == tenant))


_GAIN: Final = 0.1
"""Share of the gap between a block's importance and 1 that each recall after the first closes: ten
recalls raise a memory's default of 0.5 to 0.83. Chosen."""
_PER_BLOCK: Final = 4  # MEMORY_REF edges per block; more add nothing. Chosen


class MemoryBook:
    """Links blocks to the memories that segments name, and counts recalls."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    def refer(self, rows: Rows, segment: Segment, session: int, now: float) -> None:
        """Link a session's blocks to the memory that a segment names.

        A recall is a memory named again by another session, or by the same one for other blocks;
        text that a session repeats from turn to turn is recalled once.
        """
        memory = self._tables.memories.intern(segment.memory_id or "")
        if memory == NO_ROW or not len(rows):
            return
        facts = self._tables.memory_facts.setdefault(memory, MemoryFacts(now))
        self._count(facts, memory, rows, session, now)
        if segment.importance is None:  # a stated importance stays
            self._raise(facts, rows)
        blocks = self._tables.blocks
        rows = rows[blocks.sums_of(EdgeType.MEMORY_REF).degree[rows] < _PER_BLOCK]
        targets = np.full(len(rows), memory, dtype=np.int32)
        weights = blocks.importance[rows].astype(np.float32)
        self._tables.edges.upsert(EdgeType.MEMORY_REF, rows, targets, weights, now)

    def _count(self, facts: MemoryFacts, memory: int, rows: Rows, session: int, now: float) -> None:
        """Count a recall, unless the session only carries the memory along."""
        known = self._tables.blocks.sums_of(EdgeType.MEMORY_REF).degree[rows] > 0
        if session in facts.sessions and known.all():
            return
        linked = blocks_of_memory(self._tables.edges, memory)
        if session not in facts.sessions or not np.isin(rows, linked).all():
            facts.recalled(session, now)
            self._raise(facts, linked)

    def _raise(self, facts: MemoryFacts, rows: Rows) -> None:
        """Raise blocks' importance to what the memory's recalls justify."""
        lacking = 1.0 - float(DEFAULT_IMPORTANCE[SourceLayer.MEMORIES])
        worth = np.float32(1.0 - lacking * (1.0 - _GAIN) ** (facts.recalls - 1))
        importance = self._tables.blocks.importance
        if facts.recalls > 1:
            importance[rows] = np.maximum(importance[rows], worth)


# Groups of segments applied in one slice: a millisecond, if each names a memory. Chosen.
_GROUPS: Final = 8


class SegmentTagger:
    """Writes the layers, names and memories of segments to blocks."""

    def __init__(self, tables: Tables, layers: LayerBook, counters: Counter[str]) -> None:
        self._tables = tables
        self._layers = layers
        self._counters = counters
        self._memories = MemoryBook(tables)

    def tag(
        self, engine: int, event: RequestStarted, rows: Rows, session: int, now: float
    ) -> Iterator[None]:
        """Apply a request's segments in slices, the most precious last, so that it wins a shared
        block.
        """
        size = event.block_size
        segments = _affordable(event.segments, len(rows), size)
        if len(segments) < len(event.segments):
            self._counters["segments_left_out"] += len(event.segments) - len(segments)
        for place, (_, alike) in enumerate(groupby(segments, _statement), 1):
            self._state(list(alike), rows, size, session, now)
            if place % _GROUPS == 0:
                yield
        if named := [each for each in segments if each.name is not None]:
            self._name(named, rows, size)
        if leased := [each for each in reversed(segments) if each.pinned_s]:
            self._lease(engine, leased, rows, size, now)

    def _state(
        self, alike: Sequence[Segment], rows: Rows, size: int, session: int, now: float
    ) -> None:
        """Apply what segments of one layer, importance and authority state, and their memory."""
        first = alike[0]
        if len(alike) > 1:
            covered = rows[_places(alike, len(rows), size)[0]]
        else:
            covered = rows[slice(*_bounds(first, size))]
        layer, authority = SourceLayer(first.layer), Authority(first.authority)
        self._layers.state(covered, layer, first.importance, authority, session)
        if first.layer in PROTECTED_LAYERS:
            self._counters["blocks_protected"] += self._begin_protection(covered, authority)
        if first.memory_id is not None:
            self._memories.refer(covered, first, session, now)

    def _begin_protection(self, rows: Rows, authority: Authority) -> int:
        # Stated ones count at once, inferred ones when a second request walks them.
        if authority is not Authority.INFERRED:
            return len(rows)
        return int(np.count_nonzero(self._tables.blocks.walkers[rows] == 2))

    def _name(self, named: Sequence[Segment], rows: Rows, size: int) -> None:
        places, counts = _places(named, len(rows), size)
        numbers = [self._tables.segment_names.intern(each.name or "") for each in named]
        blocks, covered = self._tables.blocks, rows[places]
        blocks.for_writing("identity")[covered] = np.repeat(numbers, counts)
        chunks = np.arange(len(places)) - np.repeat(np.cumsum(counts) - counts, counts)
        blocks.for_writing("chunk")[covered] = np.minimum(chunks, 65_535)

    def _lease(
        self, engine: int, leased: Sequence[Segment], rows: Rows, size: int, now: float
    ) -> None:
        """Lease blocks as far as the bounds allow; a longer existing lease stays."""
        places, counts = _places(leased, len(rows), size)
        until = np.zeros(len(rows))
        np.maximum.at(until, places, now + np.repeat([_lease_s(each) for each in leased], counts))
        _, first = np.unique(places, return_index=True)
        asked = places[np.sort(first)]  # each once, the most precious first
        kept = leasable(self._tables, rows[asked], now, arriving=engine)
        pinned = self._tables.blocks.for_writing("pinned_until")
        at = np.isin(rows, kept)
        pinned[rows[at]] = np.maximum(pinned[rows[at]], until[at])


def _statement(segment: Segment) -> tuple[object, ...]:
    """What segments have in common that are applied together; a memory counts its segments."""
    alone = None if segment.memory_id is None else segment
    return segment.layer, segment.importance, segment.authority, alone


def _lease_s(segment: Segment) -> float:
    return min(segment.pinned_s or 0.0, LONGEST_S)


def _bounds(segment: Segment, size: int) -> tuple[int, int]:
    """The first block of a segment, and the one behind its last; none if it is empty."""
    return segment.start // size, -(-segment.end // size) if segment.end > segment.start else 0


def _places(
    segments: Sequence[Segment], blocks: int, size: int
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Where the blocks of segments stand in a prompt of so many blocks, segment after segment, and
    how many each has.
    """
    bounds = np.array([_bounds(each, size) for each in segments], dtype=np.intp)
    first, end = np.minimum(bounds.T, blocks)
    counts = np.maximum(end - first, 0)
    before = np.cumsum(counts) - counts
    return np.arange(counts.sum()) + np.repeat(first - before, counts), counts


def _affordable(segments: Sequence[Segment], blocks: int, size: int) -> list[Segment]:
    """The segments that a request of ``blocks`` blocks may have, least precious first."""
    # In total they cover each block at most twice, plus one block each shared with a neighbour:
    # otherwise a thousand overlapping segments would write every block a thousand times.
    room, kept = 2 * blocks + len(segments), []
    for segment in sorted(segments, key=lambda each: each.layer):
        covered = min(-(-segment.end // size), blocks) - segment.start // size
        if covered <= room:
            room -= max(covered, 0)
            kept.append(segment)
    return sorted(kept, key=lambda each: -each.layer)
