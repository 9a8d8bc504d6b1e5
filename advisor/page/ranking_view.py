"""Who goes next, with every term; and the weights that decide it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Final

import numpy as np

from ...dashboards.answers.evictions import RankedBlock, RankingView
from ...dashboards.answers.what_if import Weights as WeightsView
from ...graph.kvcache_graph import KVCacheGraph
from ...graph.messages.advice import EvictionRanking
from ...graph.queries.views import block_name
from ...graph.ranking.formulas import LruPolicy
from ...graph.ranking.policy import Policy, Terms, terms_of
from ...graph.ranking.profile import Weights
from ...graph.ranking.ruler import is_under_lru
from ...graph.ranking.rules import beyond_share, standings
from ...graph.ranking.view import View
from ...graph.tables.blocks import Selection
from ...graph.types import LAYER_NAMES, NO_ROW, Rows
from ..config.config import Config
from ..config.edits import NO_FILE
from ..config.reload import ConfigWatch
from ..config.sections import ScoreConfig
from ..policies.registry import POLICIES
from ..reasons.guard_words import beside_lru_lately
from ..reasons.term_words import BEYOND_SHARE, heeded, meanings, weight_meanings
from ..times.unix_time import Unix
from .logged.eviction_views import chosen_engine

_PROTECTED: Final = "protected_layer"
_SHARES: Final = (
    "protected_share", "protected_price_points", "tenant_share", "inferred_share", "reserved",
)  # fmt: skip
MOST: Final = 200  # blocks per answer; chosen


def ranking_view(
    graph: KVCacheGraph,
    latest: Mapping[str, EvictionRanking],
    engine: str | None,
    limit: int,
    unix: Unix,
) -> RankingView:
    """The ranking that an engine has now, the next to go first."""
    tables, now = graph.tables, graph.clock()
    name = chosen_engine(tables, engine)
    ranking = latest.get(name) if name is not None else None
    if name is None or ranking is None:
        return _empty(graph, name, unix(now))
    view = View(tables, graph.rules, tables.engines[name], now)
    by_policy = bool(len(ranking.order))
    policy: Policy = graph.policy if by_policy else LruPolicy()
    rows, ranked = _by_policy(view, ranking) if by_policy else _longest_unused(view, ranking)
    rows = rows[: min(limit, MOST)]
    known = rows[rows != NO_ROW]
    terms = terms_of(policy, view, Selection(view.blocks, known)) if len(known) else {}
    order = _ranked(view, rows, terms)
    rules = dict.fromkeys(name for each in order for name in each.standing)
    return RankingView(
        at=unix(now),
        engine=name,
        engines=list(tables.engines),
        ranked_by=policy.name,
        sentence=_who_ranks(graph, name, by_policy),
        epoch=ranking.epoch,
        age_s=round(now - ranking.ts, 3),
        terms=list(terms),
        meanings=meanings([*terms, *rules]),
        order=order,
        ranked=ranked,
        protected=len(ranking.protected),
    )


def _by_policy(view: View, ranking: EvictionRanking) -> tuple[Rows, int]:
    """The rows of a ranking, and how many it has."""
    salt = view.tables.salt(view.engine)
    return view.blocks.find(ranking.order[:MOST], salt), len(ranking.order)


def _longest_unused(view: View, ranking: EvictionRanking) -> tuple[Rows, int]:
    """The rows in the engine's own order, less what it keeps back all the same, and how many it
    has."""
    blocks, salt = view.blocks, view.tables.salt(view.engine)
    resident = np.flatnonzero(blocks.resident(view.engine)).astype(np.int32)
    kept = blocks.find(ranking.protected, salt)
    free = Selection(blocks, np.setdiff1d(resident, kept))
    oldest_first = np.argsort(-LruPolicy().scores(view, free), kind="stable")
    return free.rows[oldest_first[:MOST]], len(free)


def _ranked(view: View, rows: Rows, terms: Terms) -> list[RankedBlock]:
    """Those of these rows that are known, each with its place among them.

    Args:
        terms: Of those that are known.
    """
    places = np.flatnonzero(rows != NO_ROW)
    known = Selection(view.blocks, rows[places])
    each = [column.tolist() for column in terms.values()]
    parts = list(zip(*each, strict=True)) or [()] * len(known)
    beyond = set(beyond_share(view).tolist())
    rules = [
        [BEYOND_SHARE if name == _PROTECTED and row in beyond else name for name in each]
        for row, each in zip(known.rows.tolist(), standings(view, known), strict=True)
    ]
    found = zip(places.tolist(), known.rows.tolist(), parts, rules, strict=True)
    return [_block(view, *block) for block in found]


def _block(
    view: View, place: int, row: int, parts: tuple[float, ...], rules: list[str]
) -> RankedBlock:
    tables, blocks = view.tables, view.blocks
    session, identity = int(blocks.session[row]), int(blocks.identity[row])
    return RankedBlock(
        place=place,
        key=block_name(int(blocks.wire_keys(row))),
        layer=LAYER_NAMES[blocks.layer[row]],
        session=None if session == NO_ROW else tables.sessions.names[session],
        tenant=tables.tenants.name(int(blocks.tenant[row])),
        identity=tables.segment_names.name(identity),
        score=round(sum(parts), 3),
        terms=[round(value, 3) for value in parts],
        standing=rules,
    )


def ranked_by(graph: KVCacheGraph, engine: str) -> str:
    """The name of the policy that ranks an engine's blocks; ``lru`` where it keeps its own
    order."""
    column = graph.tables.engines.get(engine, NO_ROW)
    under_lru = is_under_lru(column, graph.policy, graph.referee)
    return LruPolicy.name if under_lru else graph.policy.name


def who_ranks(graph: KVCacheGraph, engine: str) -> str:
    """Who ranks an engine's blocks, and what its guard knows of policy and LRU, in words."""
    return _who_ranks(graph, engine, ranked_by(graph, engine) != LruPolicy.name)


def _who_ranks(graph: KVCacheGraph, engine: str, by_policy: bool) -> str:
    ruling = graph.ruling(engine)
    if by_policy:
        ahead = "" if ruling is None else f"; it is {beside_lru_lately(ruling.ahead)}"
        return f"The policy {graph.policy.name} ranks{ahead}."
    if ruling is None or ruling.policy_rules:
        return "The engine evicts the longest unused block first."
    return (
        f"LRU ranks: the policy {graph.policy.name} has not shown yet that it finds more; it is "
        f"{beside_lru_lately(ruling.ahead)}. What is protected goes last all the same."
    )


def _empty(graph: KVCacheGraph, engine: str | None, at: float) -> RankingView:
    return RankingView(
        at=at,
        engine=engine,
        engines=list(graph.tables.engines),
        ranked_by="lru",
        sentence="Nothing was ranked yet: engines evict the longest unused block first.",
        epoch=None,
        age_s=None,
        terms=[],
        meanings={},
        order=[],
        ranked=0,
        protected=0,
    )


def _said(score: ScoreConfig, names: Iterable[str]) -> dict[str, float]:
    """These numbers of a configuration; a share that nobody said is none."""
    found = {name: getattr(score, name) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def weights_view(
    watch: ConfigWatch, written: Config | None, policy: Policy, at: float
) -> WeightsView:
    """What decides the ranking, as configured.

    Args:
        written: What the file was just made to say; None: what it said when it was last read.
        policy: The one that ranks.
    """
    config, default = written or watch.config, ScoreConfig()
    score = config.score
    numbers = [each.name for each in fields(Weights)]
    numbers += ["session_memory_s", *_SHARES]
    return WeightsView(
        at=at,
        policy=policy.name,
        next_policy=config.policy.name,
        heeds=heeded(policy.name),
        policies=list(POLICIES),
        guard=config.policy.guard,
        score=_said(score, numbers),
        edge_types=score.edge_types.model_dump(),
        protected_layers=sorted(score.protected_layers),
        defaults=_said(default, numbers),
        edge_type_defaults=default.edge_types.model_dump(),
        meanings=weight_meanings(),
        layers=list(LAYER_NAMES),
        file=watch.file,
        is_editable=watch.file is not None,
        why_not=(None if watch.file is not None else NO_FILE),
        undoable=watch.editor.undoable,
    )
