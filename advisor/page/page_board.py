"""``PageBoard``: what the page asks, over the parts of a running sidecar."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

from ...dashboards.answers.caches import CacheNoted, Caches, CacheSteps
from ...dashboards.answers.engine_views import Engines
from ...dashboards.answers.evictions import Evictions, EvictionsAsked, RankingView
from ...dashboards.answers.graph_view import BlockView, GraphView
from ...dashboards.answers.misses import Misses, Requests, RequestsAsked
from ...dashboards.answers.now import Now
from ...dashboards.answers.sampled import Sampled
from ...dashboards.answers.session_views import Sessions, SessionTimeline
from ...dashboards.answers.what_if import Shadows, WeightChange, WeightEffect, Weights
from ...dashboards.intents.intent_wishes import IntentReplies, IntentWishes
from ...dashboards.source import SidecarStatus
from ...graph.intents.intent import Verdict
from ...graph.kvcache_graph import KVCacheGraph
from ...graph.messages.advice import EvictionRanking
from ...graph.queries.views import session_row
from ..caches.cache_runs import CacheRuns
from ..config.config import Config
from ..config.reload import ConfigWatch
from ..intents.intent_replies import intent_replies
from ..questions import Questions, RecentAnswers
from ..shadows.shadow_runner import ShadowRunner
from ..shadows.shadow_views import lru_tokens, shadows_view
from ..times.unix_time import UnixTime
from .engine_pages import engines_view
from .graph_columns import graph_view
from .logged.block_history import block_history
from .logged.eviction_views import chosen_engine, evictions_view
from .logged.miss_totals import misses_view
from .logged.request_views import request_views
from .now_view import now_view
from .ranking_view import ranking_view, who_ranks
from .sampled_view import sampled_view
from .sessions.session_list import sessions_view
from .sessions.session_timeline import timeline
from .weight_desk import WeightDesk


class PageBoard:
    """Implements ``PageSource``. Every method may be called from any thread.

    What many look at is worked out twice a second at most (see ``RecentAnswers``).

    Args:
        graph: Read under its lock, one question at a time.
        questions: Gives each question its turn.
        status: The sidecar's status; None without a sidecar around the graph.
        latest: Rankings by engine.
        shadows: What other policies would find; None makes shadows that do not run.
        watch: The configuration in force; None: the defaults, and no file.
        intended: Called when an intent or a signal was done, without the graph's lock.
        wall: Unix seconds.
    """

    def __init__(
        self,
        graph: KVCacheGraph,
        questions: Questions,
        *,
        status: Callable[[], SidecarStatus | None] = lambda: None,
        latest: Callable[[], Mapping[str, EvictionRanking]] = dict,
        shadows: ShadowRunner | None = None,
        watch: ConfigWatch | None = None,
        intended: Callable[[], None] = lambda: None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._graph = graph
        self._questions = questions
        self._status = status
        self._latest = latest
        self._shadows = shadows or ShadowRunner(graph, graph.clock)
        self._intended = intended
        self._unix = UnixTime(graph.clock, wall)
        self._caches = CacheRuns(wall)
        watch = watch or ConfigWatch(Config(), None, {}, graph.clock)
        self._desk = WeightDesk(graph, questions, self._shadows, watch, self._unix)
        self._recent = RecentAnswers(graph.clock)

    def now(self) -> Now:
        """The first screen."""
        return self._recent.of("now", self._now)

    def _now(self) -> Now:
        status, now = self._status(), self._graph.clock()
        with self._questions.turn():
            lru = lru_tokens(self._shadows, self._graph.tables.history.asked(now), now)
            return now_view(self._graph.tables, status, lru, now, self._unix)

    def requests(self, which: RequestsAsked) -> Requests:
        """Recent requests."""
        return self._recent.of(("requests", which), lambda: self._requests(which))

    def _requests(self, which: RequestsAsked) -> Requests:
        with self._questions.turn():
            history, now = self._graph.tables.history, self._graph.clock()
            found = list(request_views(history, which, now, self._unix))
            more = len(found) == which.limit and found[-1].id > history.requests.first
            following = found[-1].id if more and not which.is_slowest else None
            since = self._unix(history.requests.oldest) if history.requests.next else None
        return Requests(at=self._unix.now(), requests=found, next=following, since=since)

    def misses(self) -> Misses:
        """Totals by reason, and over time."""
        return self._recent.of("misses", self._misses)

    def _misses(self) -> Misses:
        with self._questions.turn():
            tables = self._graph.tables
            pools = sum(tables.pool_blocks.values())
            return misses_view(tables.history, pools, self._graph.clock(), self._unix)

    def evictions(self, which: EvictionsAsked) -> Evictions:
        """Recent evictions."""
        return self._recent.of(("evictions", which), lambda: self._evictions(which))

    def _evictions(self, which: EvictionsAsked) -> Evictions:
        with self._questions.turn():
            return evictions_view(self._graph.tables, which, self._graph.clock(), self._unix)

    def ranking(self, engine: str | None, limit: int) -> RankingView:
        """Who goes next, with every term."""
        question = ("ranking", engine, limit)
        return self._recent.of(question, lambda: self._ranking(engine, limit))

    def _ranking(self, engine: str | None, limit: int) -> RankingView:
        with self._questions.turn():
            return ranking_view(self._graph, self._latest(), engine, limit, self._unix)

    def graph_version(self) -> int:
        """Changes when the graph did."""
        return self._graph.changes.total

    def graph(self, limit: int, session: str | None = None) -> GraphView:
        """The graph as columns; only what ``session`` holds if one is named."""
        question = ("graph", limit, session)
        return self._recent.of(question, lambda: self._columns(limit, session))

    def _columns(self, limit: int, session: str | None) -> GraphView:
        with self._questions.turn():
            row = None if session is None else session_row(self._graph.tables, session, None)
            return graph_view(self._graph, limit, row, self._unix)

    def block(self, key: int) -> BlockView:
        """One block, explained, with its history."""
        with self._questions.turn():
            explained = self._graph.explain(key, self._latest())
            history = block_history(self._graph.tables, key, self._unix)
        return BlockView(
            at=self._unix.now(), key=explained["id"], explain=explained, history=history
        )

    def sessions(self, limit: int, search: str = "") -> Sessions:
        """Sessions whose name or tenant contains ``search``."""
        return self._recent.of(("sessions", limit, search), lambda: self._sessions(limit, search))

    def _sessions(self, limit: int, search: str) -> Sessions:
        with self._questions.turn():
            now = self._graph.clock()
            return sessions_view(self._graph.tables, limit, search, now, self._unix)

    def session(self, name: str, tenant: str | None, after: str = "") -> SessionTimeline:
        """One session over time; from the turn of the mark ``after`` on, if that is known."""
        with self._questions.turn():
            explained = self._graph.explain_session(name, tenant)
            tables, now = self._graph.tables, self._graph.clock()
            row = session_row(tables, name, tenant)
            return timeline(tables, row, explained, now, self._unix, after)

    def engines(self) -> Engines:
        """All engines."""
        return engines_view(self._status(), self._graph.tables.history, self._unix.now())

    def shadows(self, engine: str | None) -> Shadows:
        """What others would have found."""
        now = self._graph.clock()
        if engine is not None:
            chosen_engine(self._graph.tables, engine)
        said = partial(who_ranks, self._graph)
        return shadows_view(self._shadows, engine, now, self._unix, said)

    def weights(self) -> Weights:
        """What decides the ranking."""
        return self._desk.weights()

    def preview(self, change: WeightChange, engine: str | None) -> WeightEffect:
        """What a change of weights would do."""
        return self._desk.preview(change, engine)

    def try_weights(self, change: WeightChange) -> Shadows:
        """Let a shadow have a change from now on; nothing else changes."""
        self._desk.try_weights(change)
        return self.shadows(None)

    def end_trial(self) -> Shadows:
        """Follow no other weights in a shadow any more."""
        self._desk.end_trial()
        return self.shadows(None)

    def change_weights(self, change: WeightChange) -> Weights:
        """Write a change to the configuration file, from which it takes effect within a second,
        a policy at the next start."""
        return self._desk.change_weights(change)

    def undo_weights(self) -> Weights:
        """Take the last change back."""
        return self._desk.undo_weights()

    def sampled(self, limit: int, session: str | None = None) -> Sampled:
        """Where the model looks, and how sure it is; of one session, if it is named."""
        question = ("sampled", limit, session)
        return self._recent.of(question, lambda: self._sampled(limit, session))

    def _sampled(self, limit: int, session: str | None) -> Sampled:
        with self._questions.turn():
            tables, now = self._graph.tables, self._graph.clock()
            row = None if session is None else session_row(tables, session, None)
            return sampled_view(tables, limit, now, self._unix, row)

    def caches(self, steps: int) -> Caches:
        """The last ``steps`` of each cache that follows confidence."""
        return self._recent.of(("caches", steps), lambda: self._caches.shown(steps))

    def note_steps(self, told: CacheSteps) -> CacheNoted:
        """Remember steps of such a cache."""
        return self._caches.note(told)

    def intend(self, wishes: IntentWishes) -> IntentReplies:
        """Do what is wanted of blocks and sessions; every wish is answered."""
        with self._questions.turn():
            replies = intent_replies(self._graph, wishes)
        if any(each.answer not in (Verdict.REJECTED, Verdict.MISSING) for each in replies):
            self._intended()
        return IntentReplies(at=self._unix.now(), answers=replies)
