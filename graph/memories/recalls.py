"""Memories that sessions recall: their blocks gain importance, and their nodes properties."""

from __future__ import annotations

from typing import Final

import numpy as np

from ..messages.events import Segment
from ..sessions.memory_facts import MemoryFacts
from ..tables.tables import Tables
from ..types import DEFAULT_IMPORTANCE, NO_ROW, EdgeType, Rows, SourceLayer
from .memory_blocks import blocks_of_memory

_GAIN: Final = 0.1
"""Of what a block's importance lacks to 1, with each recall after the first: ten of them bring a
memory's default of .5 to .83. Chosen."""
_PER_BLOCK: Final = 4  # MEMORY_REF edges per block; more add nothing. Chosen


class MemoryBook:
    """Links blocks to the memories that segments name, and counts recalls."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    def refer(self, rows: Rows, segment: Segment, session: int, now: float) -> None:
        """Take that a session's blocks hold the memory that a segment names.

        A recall is a memory that is named again by another session, or by the same one at other
        blocks: what a session carries along from turn to turn is recalled once.
        """
        memory = self._tables.memories.intern(segment.memory_id or "")
        if memory == NO_ROW or not len(rows):
            return
        facts = self._tables.memory_facts.setdefault(memory, MemoryFacts(now))
        self._count(facts, memory, rows, session, now)
        if segment.importance is None:  # what is said of it stands
            self._raise(facts, rows)
        blocks = self._tables.blocks
        rows = rows[blocks.sums_of(EdgeType.MEMORY_REF).degree[rows] < _PER_BLOCK]
        targets = np.full(len(rows), memory, dtype=np.int32)
        weights = blocks.importance[rows].astype(np.float32)
        self._tables.edges.upsert(EdgeType.MEMORY_REF, rows, targets, weights, now)

    def _count(self, facts: MemoryFacts, memory: int, rows: Rows, session: int, now: float) -> None:
        """Count a recall, unless the session carries the memory along."""
        known = self._tables.blocks.sums_of(EdgeType.MEMORY_REF).degree[rows] > 0
        if session in facts.sessions and known.all():
            return
        linked = blocks_of_memory(self._tables.edges, memory)
        if session not in facts.sessions or not np.isin(rows, linked).all():
            facts.recalled(session, now)
            self._raise(facts, linked)

    def _raise(self, facts: MemoryFacts, rows: Rows) -> None:
        """Let blocks be worth what their memory's recalls make of it, or more."""
        lacking = 1.0 - float(DEFAULT_IMPORTANCE[SourceLayer.MEMORIES])
        worth = np.float32(1.0 - lacking * (1.0 - _GAIN) ** (facts.recalls - 1))
        importance = self._tables.blocks.importance
        if facts.recalls > 1:
            importance[rows] = np.maximum(importance[rows], worth)
