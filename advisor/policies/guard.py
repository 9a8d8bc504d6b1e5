"""``Guard``: keeps every engine at least at LRU. A shadow of the other order runs beside the one
that ranks.

While LRU rules, the engine evicts as stock vLLM does, and the policy proves itself in a shadow.
While the policy rules, LRU runs in a shadow, and takes over if it would have found more. What each
found is compared request by request, over a memory of some pools' worth of blocks.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from ...graph.ranking.policy import Ruling, Scores
from ...graph.ranking.view import View
from ...graph.tables.blocks import Selection
from ...graph.tables.tables import Tables
from ...graph.tables.walks import Walk
from .shadow import LruShadow, RankedShadow

logger = logging.getLogger(__name__)

# All chosen, with generated and recorded traffic of several kinds in sight.
_MEMORY: Final = 40.0  # pools' worth of walked blocks over which evidence fades by half
_SURE: Final = 1.0  # standard deviations by which one must be ahead
_AHEAD: Final = 0.02  # … and by this share of a pool's blocks


class Guard:
    """Says for each engine whether the policy may rank; see the module.

    Args:
        name: The policy's name, for the log.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._cases: dict[int, _Case] = {}

    def trusts(self, engine: int) -> bool:
        """Whether the policy ranks this engine's blocks; otherwise LRU does."""
        case = self._cases.get(engine)
        return case is not None and case.trusted

    def rulings(self) -> dict[int, Ruling]:
        """The ruling on each engine that is watched, by residency column."""
        return {
            engine: Ruling(case.trusted, case.evidence.ahead, case.changes)
            for engine, case in self._cases.items()
        }

    def watch(self, view: View, scores: Callable[[Selection], Scores]) -> None:
        """Compare what was found since the last ranking, and decide who rules from now on.

        Args:
            scores: The policy's scores of any blocks, under the rules; higher goes first.
        """
        tables, engine = view.tables, view.engine
        capacity = tables.pool_blocks.get(engine, 0) - 1  # vLLM keeps one for itself
        if capacity < 1:
            return
        case = self._cases.get(engine)
        if tables.walks.watch(engine) or case is None or case.lru.capacity != capacity:
            trusted = case is not None and case.trusted
            case = _Case(LruShadow(capacity), RankedShadow(capacity), trusted)
            case.hold_what_is_there(tables, engine)
            self._cases[engine] = case
        for walk in tables.walks.take(engine):
            case.follow(walk, tables)
        if case.is_due_for_change():
            case.change_hands(tables, engine)
            self._say(tables, engine, case)
        if not case.trusted:
            rows = case.ranked.rows(tables.blocks.keys)
            case.ranked.adopt(rows, scores(Selection(tables.blocks, rows)))

    def forget(self, engine: int) -> None:
        """Forget an engine that is gone: the next one in its column begins under LRU."""
        self._cases.pop(engine, None)

    def _say(self, tables: Tables, engine: int, case: _Case) -> None:
        name = tables.name_of(engine) or "?"
        ruler, other = (self._name, "LRU") if case.trusted else ("LRU", self._name)
        logger.info("engine %s: %s ranks from now on; it finds more than %s", name, ruler, other)


@dataclass(slots=True)
class Evidence:
    """By how many blocks the policy is ahead of LRU, and the spread of that; old walks fade."""

    memory: float
    ahead: float = 0.0
    spread: float = 0.0

    def add(self, difference: int, walked: int) -> None:
        """Note that the policy found so many blocks more than LRU in a request of ``walked``
        blocks."""
        fade = 0.5 ** (walked / self.memory)
        self.ahead = self.ahead * fade + difference
        self.spread = self.spread * fade + difference * difference

    def is_sure(self, least: float) -> bool:
        """Whether the leader is ahead by more than chance, and by ``least`` blocks."""
        return abs(self.ahead) > max(_SURE * math.sqrt(self.spread), least)


@dataclass(slots=True)
class _Case:
    """One engine: both shadows, and what is known for and against the policy."""

    lru: LruShadow
    ranked: RankedShadow
    trusted: bool = False
    changes: int = 0
    evidence: Evidence = field(init=False)

    def __post_init__(self) -> None:
        self._forget()

    def follow(self, walk: Walk, tables: Tables) -> None:
        """Follow a request that began or ended."""
        rows = walk.rows
        keys = tables.blocks.keys[rows]
        if walk.found >= 0:
            matched = rows[: walk.reach], keys[: walk.reach]
            ours = walk.found if self.trusted else self.ranked.found(*matched)
            self.evidence.add(min(ours, walk.reach) - self.lru.found(*matched), len(rows))
        self.lru.use(rows, keys)
        if not self.trusted:
            self.ranked.use(rows, keys)

    def is_due_for_change(self) -> bool:
        """Whether the other order is surely better."""
        # Each change that was taken back makes the next one harder: two equals do not take turns.
        least = _AHEAD * self.lru.capacity * (1 + self.changes // 2)
        return self.evidence.is_sure(least) and (self.evidence.ahead > 0) != self.trusted

    def change_hands(self, tables: Tables, engine: int) -> None:
        """Let the other order rank from now on."""
        self.trusted = not self.trusted
        self.changes += 1
        self._forget()
        if not self.trusted:
            resident = np.flatnonzero(tables.blocks.resident(engine)).astype(np.int32)
            self.ranked.restart(resident, tables.blocks.keys[resident])

    def hold_what_is_there(self, tables: Tables, engine: int) -> None:
        """Fill both shadows with the blocks of the engine's pool, the last used on top."""
        blocks = tables.blocks
        resident = blocks.pick(blocks.resident(engine))
        oldest_last = resident.rows[np.argsort(-resident.last_used(), kind="stable")]
        keys = blocks.keys[oldest_last]
        self.lru.use(oldest_last, keys)
        self.ranked.use(oldest_last, keys)

    def _forget(self) -> None:
        self.evidence = Evidence(_MEMORY * self.lru.capacity)
