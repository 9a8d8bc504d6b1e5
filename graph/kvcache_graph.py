"""KVCacheGraph: what an engine's KV cache holds, and how its blocks relate."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from . import explain as views
from .compiled import require_compiled
from .explain import row_of
from .ingest.ingest import Ingest
from .intents import IntentBook
from .logs.history import LoggedTables
from .ranking.copies import prefetch_candidates
from .ranking.formulas import ClassicPolicy
from .ranking.order import RankingSources, is_under_lru, rank_by_ruler
from .ranking.policy import Policy, PolicyChoice, Referee, Rules, ScoreProfile, View
from .ranking.rules import may_keep
from .stats import GraphStats, graph_stats
from .tables.integrity import check_integrity
from .tables.tables import GraphLimits
from .types import NO_ROW, BlockKey, Keys, as_keys
from .wire.advice import EvictionRanking
from .wire.events import (
    AdmissionReport,
    AdviceApplied,
    AnyEvent,
    EngineHello,
    Pressure,
    RequestHeld,
    RequestReleased,
    TierReport,
)


class ChangeCounts:
    """Counts changes per engine, to tell whether a ranking is out of date."""

    def __init__(self) -> None:
        self.total = 0  # changes of all engines
        self._all = 0
        self._own: Counter[str] = Counter()

    def of(self, engine: str) -> int:
        """Return the engine's count."""
        return self._all + self._own[engine]

    def changed(self, engine: str) -> None:
        """Count a change by this engine; others with the same blocks lost none of theirs."""
        self._own[engine] += 1
        self.total += 1

    def all_changed(self) -> None:
        """Mark all rankings as out of date."""
        self._all += 1
        self.total += 1

    def forget(self, engine: str) -> None:
        """Remove an engine that is gone; no other count falls."""
        self._all += self._own.pop(engine, 0) + 1
        self.total += 1


_SIGNS_OF_LIFE: frozenset[type] = frozenset({
    EngineHello, Pressure, AdviceApplied, TierReport, AdmissionReport, RequestHeld, RequestReleased
})  # fmt: skip


class KVCacheGraph:
    """Typed-edge graph over KV blocks, kept in columns.

    One thread applies events; any other thread must hold ``lock`` while reading. Times are
    monotonic seconds of ``clock``.

    Args:
        profile: Weights of the classic policy and rules, used if no others are given.

    Attributes:
        policy: Scores blocks; may be replaced while running.
        rules: Bind every policy; see ``configure``.
        referee: Decides where the policy may rank. Elsewhere, and with the policy ``lru``, the
            engine keeps its own order, apart from protected blocks.
        models: The models of engines that do not report theirs, by engine id.
        intents: Intents stated outside requests; use it under ``lock``, and count the change.
        changes: Change counts, which tell when a ranking is out of date.

    Raises:
        CompiledPartMissingError: kvgraph was installed without ``kvgraph._graph``.
    """

    def __init__(
        self,
        *,
        profile: ScoreProfile | None = None,
        policy: Policy | None = None,
        rules: Rules | None = None,
        referee: Referee | None = None,
        limits: GraphLimits | None = None,
        models: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        require_compiled()
        self.policy = policy or ClassicPolicy(profile)
        self.rules = rules or profile or Rules()
        self.referee, self.models = referee, models or {}
        self.lock, self.changes, self.clock = threading.RLock(), ChangeCounts(), clock
        self.tables = LoggedTables(limits or GraphLimits())
        self.tables.protected_share = self.rules.protected_share
        self._ingest = Ingest(self.tables, self._is_under_lru)
        self.intents = IntentBook(self.tables, self._ingest.signalled, clock)

    def configure(self, rules: Rules, limits: GraphLimits | None = None) -> None:
        """Use these rules and limits from now on; earlier rankings become out of date."""
        self.rules, self.tables.limits = rules, limits or self.tables.limits
        self.tables.protected_share = rules.protected_share
        self.changes.all_changed()

    @property
    def counters(self) -> Counter[str]:
        """Counts since the start, such as evictions by layer, refused events, and tokens."""
        return self._ingest.counters

    @property
    def engines(self) -> list[str]:
        """The engines that have a residency column."""
        return list(self.tables.engines)

    def apply(self, engine: str, events: Sequence[AnyEvent]) -> None:
        """Apply events of one engine, in order; raises as ``slices`` does."""
        for _ in self.slices(engine, events):
            pass

    def slices(self, engine: str, events: Sequence[AnyEvent]) -> Iterator[None]:
        """Apply events in slices, one per iteration, so that a reading thread waits for one slice
        at most.

        The caller holds ``lock`` during each iteration, runs all of them, and applies nothing else
        meanwhile. Between two iterations the tables are consistent.

        Raises:
            GraphError: There are ``MAX_ENGINES`` other engines already.
        """
        column = self.tables.column_of(engine, self.models.get(engine, ""))
        yield from self._ingest.slices(column, events, self.clock())
        if not _SIGNS_OF_LIFE.issuperset(map(type, events)):
            self.changes.changed(engine)

    def resident_count(self, engine: str) -> int:
        """Return the number of blocks in the engine's pool, as it reported; 0 if it never did."""
        column = self.tables.engines.get(engine)
        return 0 if column is None else len(self.tables.blocks.holding(column))

    def forget_engine(self, engine: str) -> None:
        """Forget an engine that is gone: none of its blocks is resident any more."""
        for _ in self.forgetting(engine):
            pass

    def forgetting(self, engine: str) -> Iterator[None]:
        """As ``forget_engine``, in slices as of ``slices``.

        The engine is unlisted from the first slice on. If it returns before the last one, it starts
        with a new column.
        """
        column = self.tables.engines.pop(engine, None)
        if column is not None:
            if self.referee is not None:
                self.referee.forget(column)
            self.changes.forget(engine)
            yield from self._ingest.forgetting(column, self.clock())

    def ruling(self, engine: str) -> PolicyChoice | None:
        """Return whether the policy or LRU ranks this engine's blocks; None without a referee, or
        before it has seen the engine.
        """
        if self.referee is None:
            return None
        return self.referee.policy_choices().get(self.tables.engines.get(engine, NO_ROW))

    def rank(self, engine: str, limit: int, *, for_copies: bool = True) -> EvictionRanking:
        """Rank the blocks that this engine should evict first; empty for an unknown engine.

        Holds ``lock`` only while reading columns, unless the caller holds it already.

        Args:
            for_copies: Whether to include which of the blocks are worth a copy.
        """
        column = self.tables.engines.get(engine)
        if column is None:
            return EvictionRanking.empty(self.clock())
        view = replace(self._view(column), lock=self.lock)
        ranking = rank_by_ruler(view, self.policy, self.referee, limit, for_copies)
        return replace(ranking, may_keep=may_keep(view))

    def suggest_eviction(self, n: int, engine: str | None = None) -> list[BlockKey]:
        """Return the ``n`` blocks to evict first; protected ones only if nothing else is left."""
        named = next(iter(self.tables.engines), "") if engine is None else engine
        ranking = self.rank(named, max(n, self.resident_count(named)))
        both = np.concatenate([ranking.order, ranking.protected])
        listed: list[BlockKey] = both[: max(0, n)].tolist()
        return listed

    def prefetch_order(self, engine: str, limit: int) -> Keys:
        """Return the copies that this engine should load back, most useful first, uint64 ``[≤
        limit]``.
        """
        column, blocks = self.tables.engines.get(engine), self.tables.blocks
        if column is None or not blocks.had_copies:
            return as_keys([])
        return blocks.wire_keys(prefetch_candidates(self._view(column), limit))

    def neighbors(self, key: BlockKey) -> list[dict[str, Any]]:
        """Return the edges at a block: other node, type, direction and weight."""
        return views.neighbors(self.tables, row_of(self.tables, key))

    def explain(
        self, key: BlockKey, known: Mapping[str, EvictionRanking] | None = None
    ) -> dict[str, Any]:
        """Explain a block's rank: every term, its place, who ranks, and what protects it.

        Args:
            known: Recent rankings by engine. Blocks are ranked again only for an engine whose
                ranking does not contain the block.

        Raises:
            GraphError: The graph does not know the block.
        """
        order = RankingSources(self.policy, self.referee, known or {})
        return views.explain(self._view(), order, row_of(self.tables, key))

    def explain_session(self, name: str, tenant: str | None = None) -> dict[str, Any]:
        """Return what a session is doing and holds; raises GraphError if none or several match."""
        return views.explain_session(self._view(), name, tenant)

    def explain_memory(self, name: str) -> dict[str, Any]:
        """Return which requests recall a memory; raises GraphError if no block refers to it."""
        return views.explain_memory(self._view(), name)

    def held(self, session: str, tenant: str | None = None) -> dict[str, float]:
        """Return engine → seconds for which it has held a request of this session."""
        now, since = self.clock(), self._ingest.held.since(session, tenant)
        engines = self.tables.engines.items()
        return {name: now - since[column] for name, column in engines if column in since}

    def waiting(self) -> dict[str, float]:
        """Return request id → seconds for which its engine has held it."""
        now = self.clock()
        return {held.request.request_id: now - held.since for held in self._ingest.held.all()}

    def stats(self) -> GraphStats:
        """Return counts and sizes as of now."""
        return graph_stats(self._view(), self.counters, self._ingest.semantic.nbytes)

    def embeddings(self) -> dict[str, npt.NDArray[Any]]:
        """Return embedding arrays for ``adopt``; empty if no block has one."""
        return self._ingest.semantic.vectors()

    def adopt(self, tables: LoggedTables, embeddings: dict[str, npt.NDArray[Any]]) -> None:
        """Replace the present, empty tables with restored ones."""
        ingest = Ingest(tables, self._is_under_lru)
        ingest.semantic.load_vectors(embeddings)
        self.tables, self._ingest = tables, ingest
        self.changes.all_changed()

    def check_integrity(self) -> None:
        """Verify every invariant; raises ``AssertionError`` naming the first broken one."""
        check_integrity(self.tables)

    def _is_under_lru(self, column: int) -> bool:
        return is_under_lru(column, self.policy, self.referee)

    def _view(self, column: int = NO_ROW) -> View:
        """A view as of now, of one engine or of none."""
        return View(self.tables, self.rules, column, self.clock())
