"""``PageBoard``: what the page asks, over the parts of a running sidecar."""

from __future__ import annotations

import time
from collections.abc import Callable

from ...dashboards.api.engine_views import Engines
from ...dashboards.api.evictions import Evictions, RankingView
from ...dashboards.api.graph_view import BlockView, GraphView, Links, Names, Nodes
from ...dashboards.api.misses import Loss, Misses, Requests
from ...dashboards.api.now import Now, TokenHistory
from ...dashboards.api.session_views import Sessions, SessionTimeline
from ...dashboards.api.what_if import Shadows, Weights
from ...graph.errors import GraphError
from ...graph.kvcache_graph import KVCacheGraph
from ..questions import Questions


class PageBoard:
    """Fulfils ``PageSource``. Every method may be called from any thread.

    Args:
        graph: Read under its lock, one question at a time.
        questions: Gives each its turn.
        wall: Unix seconds.
    """

    def __init__(
        self,
        graph: KVCacheGraph,
        questions: Questions,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._graph = graph
        self._questions = questions
        self._wall = wall

    def now(self) -> Now:
        """The first screen."""
        history = TokenHistory(
            step_s=60.0,
            starts=[],
            requests=[],
            asked=[],
            pool=[],
            loaded=[],
            prefetched=[],
            computed=[],
            lru=[],
        )
        return Now(
            at=self._wall(),
            verdict="no request was seen yet",
            windows=[],
            history=history,
            prefill_tokens_per_s=None,
            pools=[],
            tiers=[],
            advice=[],
            attention=[],
        )

    def requests(
        self, limit: int, before: int | None = None, session: str | None = None
    ) -> Requests:
        """Recent requests, the newest first; only those of ``session`` if one is named."""
        return Requests(at=self._wall(), requests=[], next=None)

    def misses(self) -> Misses:
        """Totals by reason, and over time."""
        loss = Loss(
            multi_turn=0, cross_session=0, capacity_multi_turn=None, capacity_cross_session=None
        )
        return Misses(
            at=self._wall(),
            reasons={},
            totals={},
            step_s=60.0,
            starts=[],
            requests={},
            blocks={},
            loss=loss,
        )

    def evictions(self, engine: str | None, limit: int, before: int | None = None) -> Evictions:
        """Recent evictions, the newest first."""
        return Evictions(
            at=self._wall(),
            engine=engine,
            engines=[],
            window_s=600.0,
            evictions=[],
            next=None,
            rules={},
            protected_lost=None,
        )

    def ranking(self, engine: str | None, limit: int) -> RankingView:
        """Who goes next, with every term."""
        return RankingView(
            at=self._wall(),
            engine=engine,
            engines=[],
            ranked_by="lru",
            sentence="nothing was ranked yet",
            epoch=None,
            age_s=None,
            terms=[],
            order=[],
            ranked=0,
            protected=0,
        )

    def graph_version(self) -> int:
        """Changes when the graph did."""
        return self._graph.version

    def graph(self, limit: int, session: str | None = None) -> GraphView:
        """The graph as columns; only what ``session`` holds if one is named."""
        nodes = Nodes(**{name: [] for name in Nodes.model_fields})
        links = Links(**{name: [] for name in Links.model_fields})
        names = Names(**{name: [] for name in Names.model_fields})
        return GraphView(
            at=self._wall(), version=0, blocks=0, edges=0, nodes=nodes, links=links, names=names
        )

    def block(self, key: int) -> BlockView:
        """One block, explained, with its history."""
        with self._questions.turn():
            explained = self._graph.explain(key)
        return BlockView(at=self._wall(), key=explained["id"], explain=explained, history=[])

    def sessions(self, limit: int, search: str = "") -> Sessions:
        """Sessions whose name or tenant contains ``search``."""
        return Sessions(at=self._wall(), sessions=[], known=0, states={})

    def session(self, name: str, tenant: str | None) -> SessionTimeline:
        """One session over time."""
        raise GraphError("no session of that name is known: never seen, or long forgotten")

    def engines(self) -> Engines:
        """All engines."""
        return Engines(
            at=self._wall(), version="", uptime_s=0.0, endpoint="", engines=[], counters={}
        )

    def shadows(self, engine: str | None) -> Shadows:
        """What others would have found."""
        return Shadows(
            at=self._wall(),
            engine=engine,
            engines=[],
            sampled_share=0.0,
            sessions=0,
            step_s=60.0,
            starts=[],
            shadows=[],
        )

    def weights(self) -> Weights:
        """What decides the ranking."""
        return Weights(
            policy="lifecycle",
            at=self._wall(),
            policies=[],
            guard=True,
            score={},
            edge_types={},
            protected_layers=[],
            defaults={},
            edge_type_defaults={},
            layers=[],
            file=None,
            is_editable=False,
            why_not="not yet",
        )
