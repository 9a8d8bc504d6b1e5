"""``/v1/ranking``: the blocks to be evicted next, with every term of their scores."""

from __future__ import annotations

from typing import Final

import numpy as np
from fastapi import APIRouter
from fastapi.responses import Response

from ...dashboards.answer import Answer, Part
from ...graph.explain import block_name
from ...graph.kvcache_graph import KVCacheGraph
from ...graph.ranking.formulas import LruPolicy
from ...graph.ranking.order import is_under_lru
from ...graph.ranking.policy import Policy, Terms, View, terms_of
from ...graph.ranking.rules import beyond_share, standings
from ...graph.tables.blocks import Selection
from ...graph.types import LAYER_NAMES, NO_ROW, Rows
from ...graph.wire.advice import EvictionRanking
from ..words.words import BEYOND_SHARE, beside_lru_lately, meanings
from .page import NameQuery, Page, RecordsQuery, answered, chosen_engine, recent

MOST: Final = 200  # blocks per answer; chosen
_PROTECTED: Final = "protected_layer"


class RankedBlock(Part):
    """One block of the ranking; ``terms`` are in the order of the answer's ``terms``."""

    place: int
    key: str
    layer: str
    session: str | None
    tenant: str | None
    identity: str | None
    score: float
    terms: list[float]
    standing: list[str]


class RankingView(Answer):
    """An engine's present ranking, in order of eviction.

    Attributes:
        ranked_by: The policy's name, or ``lru``: then ``order`` is the engine's own order.
        sentence: Who ranks and why, in words.
        terms: The names of a score's terms.
        meanings: Meanings of these terms, and of the rules that apply to some of these blocks, in
            words.
        ranked: Number of blocks in the whole ranking.
        protected: Number of blocks evicted only if nothing else is left.
    """

    engine: str | None
    engines: list[str]
    ranked_by: str
    sentence: str
    epoch: int | None
    age_s: float | None
    terms: list[str]
    meanings: dict[str, str]
    order: list[RankedBlock]
    ranked: int
    protected: int


def add_routes(paths: APIRouter, page: Page) -> None:
    @paths.get("/ranking", response_model=RankingView)
    def ranking(engine: NameQuery = None, limit: RecordsQuery = 100) -> Response:
        return answered(ranking_of(page, engine, limit))


@recent
def ranking_of(page: Page, engine: str | None, limit: int) -> RankingView:
    graph, tables = page.graph, page.graph.tables
    with page.questions.turn():
        now, latest, name = graph.clock(), page.latest(), chosen_engine(tables, engine)
        ranking = latest.get(name) if name is not None else None
        if name is None or ranking is None:
            return _empty(graph, name, page.unix(now))
        view = View(tables, graph.rules, tables.engines[name], now)
        by_policy = bool(len(ranking.order))
        policy: Policy = graph.policy if by_policy else LruPolicy()
        if by_policy:
            rows = view.blocks.find(ranking.order[:MOST], tables.salt(view.engine))
            ranked = len(ranking.order)
        else:
            rows, ranked = _longest_unused(view, ranking)
        rows = rows[: min(limit, MOST)]
        known = rows[rows != NO_ROW]
        terms = terms_of(policy, view, Selection(view.blocks, known)) if len(known) else {}
        order = _ranked(view, rows, terms)
        rules = dict.fromkeys(name for each in order for name in each.standing)
        return RankingView(
            at=page.unix(now),
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


def _longest_unused(view: View, ranking: EvictionRanking) -> tuple[Rows, int]:
    """The rows in the engine's own order without those it protects, and how many there are."""
    blocks, salt = view.blocks, view.tables.salt(view.engine)
    resident = blocks.holding(view.engine).rows
    kept = blocks.find(ranking.protected, salt)
    free = Selection(blocks, np.setdiff1d(resident, kept))
    oldest_first = np.argsort(-LruPolicy().scores(view, free), kind="stable")
    return free.rows[oldest_first[:MOST]], len(free)


def _ranked(view: View, rows: Rows, terms: Terms) -> list[RankedBlock]:
    """The rows that are known, each with its place; ``terms`` has a column for each of these."""
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
    """Return the policy that ranks an engine's blocks; ``lru``: the engine's own order."""
    column = graph.tables.engines.get(engine, NO_ROW)
    under_lru = is_under_lru(column, graph.policy, graph.referee)
    return LruPolicy.name if under_lru else graph.policy.name


def who_ranks(graph: KVCacheGraph, engine: str) -> str:
    """Describe who ranks an engine's blocks, and how its guard rates policy against LRU."""
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
