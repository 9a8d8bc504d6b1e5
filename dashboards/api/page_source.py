"""What the API shows: the contract that the sidecar fulfils."""

from __future__ import annotations

from typing import Protocol

from ..answers.caches import CacheNoted, Caches, CacheSteps
from ..answers.engine_views import Engines
from ..answers.evictions import Evictions, EvictionsAsked, RankingView
from ..answers.graph_view import BlockView, GraphView
from ..answers.misses import Misses, Requests, RequestsAsked
from ..answers.now import Now
from ..answers.sampled import Sampled
from ..answers.session_views import Sessions, SessionTimeline
from ..answers.what_if import Shadows, WeightChange, WeightEffect, Weights
from ..intents.intent_wishes import IntentReplies, IntentWishes


class PageSource(Protocol):
    """Answers the page's questions, from any thread.

    Each raises GraphError for a block, session or engine that nobody knows, and BusyError while
    the graph cannot be asked. ``engine`` None stands for the only engine, or the first of several.
    """

    def now(self) -> Now:
        """The first screen."""

    def requests(self, which: RequestsAsked) -> Requests:
        """Recent requests."""

    def misses(self) -> Misses:
        """Totals by reason, and over time."""

    def evictions(self, which: EvictionsAsked) -> Evictions:
        """Recent evictions."""

    def ranking(self, engine: str | None, limit: int) -> RankingView:
        """Who goes next, with every term."""

    def graph_version(self) -> int:
        """Changes when the graph did; costs nothing."""

    def graph(self, limit: int, session: str | None = None) -> GraphView:
        """The graph as columns; only what ``session`` holds if one is named."""

    def block(self, key: int) -> BlockView:
        """One block, explained, with its history."""

    def sessions(self, limit: int, search: str = "") -> Sessions:
        """Sessions whose name or tenant contains ``search``."""

    def session(self, name: str, tenant: str | None, after: str = "") -> SessionTimeline:
        """One session over time; from the turn of the mark ``after`` on, if that is known."""

    def engines(self) -> Engines:
        """All engines."""

    def shadows(self, engine: str | None) -> Shadows:
        """What others would have found."""

    def sampled(self, limit: int, session: str | None = None) -> Sampled:
        """Where the model looks, and how sure it is; up to ``limit`` blocks and sessions.

        Only what ``session`` holds, if one is named.
        """

    def caches(self, steps: int) -> Caches:
        """The last ``steps`` of each cache that follows confidence."""

    def note_steps(self, told: CacheSteps) -> CacheNoted:
        """Remember steps of such a cache."""

    def weights(self) -> Weights:
        """What decides the ranking."""

    def preview(self, change: WeightChange, engine: str | None) -> WeightEffect:
        """What a change of weights would do; raises ConfigError for one that is not allowed."""

    def try_weights(self, change: WeightChange) -> Shadows:
        """Let a shadow have a change from now on; raises ConfigError for one that is not
        allowed."""

    def end_trial(self) -> Shadows:
        """Follow no other weights in a shadow any more."""

    def change_weights(self, change: WeightChange) -> Weights:
        """Write a change to the configuration file; raises ConfigError where that cannot be."""

    def undo_weights(self) -> Weights:
        """Take the last change back; raises ConfigError where there is none."""

    def intend(self, wishes: IntentWishes) -> IntentReplies:
        """Do what is wanted of blocks and sessions; every wish is answered."""
