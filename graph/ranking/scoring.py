"""What a ranking means: the eviction score, under the rules that bind every policy.

Higher scores go first. All of it is vector expressions over columns; nothing here walks edges
or visits a block at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from ..errors import GraphError
from ..tables.blocks import BlockTable, Places, Selection
from ..tables.tables import Tables
from ..types import (
    PROTECTED_LAYERS,
    BlockFlag,
    EdgeType,
    Keys,
    Rows,
    SourceLayer,
    Tier,
)
from .copy_worth import COPIES, worth_spilling
from .policy import Policy, Scores
from .rules import PROTECTED_BELOW, Mask, flagged, lay_rules, of_session

Tiers = npt.NDArray[np.uint8]
Term = list[tuple[float, npt.NDArray[Any]]]

# Of equal scores the deeper block goes first, as when vLLM frees a request tail first.
_DEPTH_TIE: Final = 1e-5
_NEVER: Final = -np.inf
_GRAPH_TERMS: Final = ("degree", "edge_weight", "importance")

_DEFAULT_EDGE_TYPES: Final = {
    EdgeType.PREFIX_SHARE: 1.0,
    EdgeType.CO_ATTEND: 1.0,
    EdgeType.SEMANTIC: 0.5,
    EdgeType.TEMPORAL: 0.1,
    EdgeType.SPILL_LINK: 0.0,
    EdgeType.MEMORY_REF: 1.0,
}


@dataclass(frozen=True, slots=True)
class ScoreProfile:
    """Weights of the eviction score.

    ``score = age·seconds + degree·Σ wₜ·degreeₜ + edge_weight·Σ wₜ·weightₜ + importance·importance
    + hit_count·hits + session_credit·credit``

    Attributes:
        session_credit: Weight of the claim, in [0, 1], of the session that last walked a block.
        session_memory_s: Over how many idle seconds that claim fades (to 1/e).
        edge_types: wₜ: what an edge of each type counts.
        protected_layers: Never evicted while an unprotected block exists.
        protected_share: Of a pool, in all; beyond it the least precious lose their protection.
            Chosen: half of a pool still serves those who protect nothing.
        tenant_share: Of a pool, by the word of one named tenant. Chosen: two of them cannot take
            all that may be protected from a third.
        horizon_s: A session that is expected back within this is due.
    """

    age: float = 0.01
    degree: float = -5.0
    edge_weight: float = -2.0
    importance: float = -20.0
    hit_count: float = -3.0
    session_credit: float = -40.0
    session_memory_s: float = 300.0
    edge_types: dict[EdgeType, float] = field(default_factory=lambda: dict(_DEFAULT_EDGE_TYPES))
    protected_layers: frozenset[SourceLayer] = PROTECTED_LAYERS
    protected_share: float = 0.5
    tenant_share: float = 0.25
    horizon_s: float = 3.0


@dataclass(frozen=True, slots=True, eq=False)
class Ranking:
    """Block keys of one engine, evict first → evict last; see ``advice.EvictionRanking``."""

    order: Keys
    protected: Keys
    spill_first: Keys
    sink_first: Keys


def score_terms(
    tables: Tables, profile: ScoreProfile, picked: Selection, now: float
) -> dict[str, Term]:
    """The score's terms: each a list of weights and the values, ``[n]``, that they multiply."""
    blocks = tables.blocks
    degree, weight = profile.degree, profile.edge_weight
    return {
        "age": [(profile.age, now - picked.last_used())],
        "degree": _over_types(degree, blocks.degree, profile, tables, picked),
        "edge_weight": _over_types(weight, blocks.edge_weight, profile, tables, picked),
        "importance": [(profile.importance, picked.of(blocks.importance))],
        "hit_count": [(profile.hit_count, picked.of(blocks.hit_count))],
        "session_credit": [(profile.session_credit, _credit(tables, profile, picked, now))],
    }


@runtime_checkable
class Weighted(Protocol):
    """A policy that heeds the configured weights; assign others while it runs."""

    profile: ScoreProfile


def graph_worth(
    tables: Tables, profile: ScoreProfile, picked: Selection, now: float
) -> npt.NDArray[np.float64]:
    """float64 ``[len(picked)]``: points for what the graph knows beside time: edges, importance."""
    worth = np.zeros(len(picked))
    terms = score_terms(tables, profile, picked, now)
    for name in _GRAPH_TERMS:
        for weight, values in terms[name]:
            worth -= weight * values
    return worth


class ClassicPolicy:
    """The weighted sum of ``ScoreProfile``."""

    name: Final = "classic"

    def __init__(self, profile: ScoreProfile | None = None) -> None:
        self.profile = profile or ScoreProfile()

    def observe(self, tables: Tables, engine: int, now: float) -> None:
        """Nothing to learn: the weights are configuration."""

    def scores(self, tables: Tables, engine: int, picked: Selection, now: float) -> Scores:
        """float64 ``[len(picked)]``; the same on every engine."""
        scores = np.multiply(picked.of(tables.blocks.depth), _DEPTH_TIE, dtype=np.float64)
        scratch = np.empty(len(scores))
        for term in score_terms(tables, self.profile, picked, now).values():
            for weight, values in term:
                scores += np.multiply(values, weight, out=scratch)
        return scores

    def terms(self, tables: Tables, row: int, now: float) -> dict[str, float]:
        """Every term of the sum."""
        only = Selection(tables.blocks, np.array([row], dtype=np.int32))
        return {
            name: sum(weight * float(values[0]) for weight, values in term)
            for name, term in score_terms(tables, self.profile, only, now).items()
        }


class LruPolicy:
    """The engine's own order: the longest unused goes first."""

    name: Final = "lru"

    def observe(self, tables: Tables, engine: int, now: float) -> None:
        """Nothing to learn."""

    def scores(self, tables: Tables, engine: int, picked: Selection, now: float) -> Scores:
        """float64 ``[len(picked)]``: seconds since each was used."""
        idle = now - picked.last_used()
        return np.asarray(idle + picked.of(tables.blocks.depth) * _DEPTH_TIE)

    def terms(self, tables: Tables, row: int, now: float) -> dict[str, float]:
        """The age is all there is."""
        only = Selection(tables.blocks, np.array([row], dtype=np.int32))
        return {"age": float(now - only.last_used()[0])}


def rank(
    tables: Tables, policy: Policy, profile: ScoreProfile, engine: int, limit: int, now: float
) -> Ranking:
    """The ``limit`` blocks, protected blocks and copies that this engine should lose first."""
    blocks = tables.blocks
    held = blocks.pick(blocks.tiers[engine, : blocks.size] != 0)
    tiers = held.of(blocks.tiers[engine])
    scores = _ruled_scores(tables, policy, profile, engine, held, now)
    sinking = _sinking(scores, blocks, held, tiers, limit)
    scores = _tail_first(scores, blocks, held, (tiers & int(Tier.HOT)) != 0)
    open_to_loss = scores > PROTECTED_BELOW
    victims = _highest(scores, open_to_loss, limit)
    protected = _highest(scores, ~open_to_loss & (scores > _NEVER), limit)
    spilling = np.concatenate([victims, protected])
    wanted = (np.take(tiers, spilling) & COPIES) == 0
    wanted[: len(victims)] &= worth_spilling(tables, held.rows[victims], now)
    named = (victims, protected, spilling[wanted], sinking)
    keys, salt = held.of(blocks.keys), tables.salt(engine)
    return Ranking(*(np.take(keys, places) ^ salt for places in named))


def resident_scores(
    tables: Tables, policy: Policy, profile: ScoreProfile, engine: int, now: float
) -> tuple[Rows, Scores]:
    """Rows in the engine's pool, and their scores under the rules, chains tail first."""
    resident = tables.blocks.pick(tables.blocks.resident(engine))
    return resident.rows, whole_scores(tables, policy, profile, engine, now, resident)


def whole_scores(
    tables: Tables,
    policy: Policy,
    profile: ScoreProfile,
    engine: int,
    now: float,
    picked: Selection,
) -> Scores:
    """float64 ``[len(picked)]``: scores of any blocks under the rules, chains tail first."""
    scores = _ruled_scores(tables, policy, profile, engine, picked, now)
    return keep_chains_whole(scores, picked.parents())


def _ruled_scores(
    tables: Tables, policy: Policy, profile: ScoreProfile, engine: int, held: Selection, now: float
) -> Scores:
    scores = policy.scores(tables, engine, held, now)
    if len(scores) != len(held):
        raise GraphError(
            f"policy {policy.name!r} gave {len(scores)} scores for {len(held)} blocks; "
            "it must give one for each"
        )
    return lay_rules(scores, tables, profile, engine, held, now)


def _tail_first(scores: Scores, blocks: BlockTable, held: Selection, among: Mask) -> Scores:
    """float64 ``[len(held)]``: chains whole ``among`` some blocks, ``-inf`` for the others."""
    if among.all():  # as always where an engine has no other tiers
        return keep_chains_whole(scores, held.parents())
    chosen = np.full(len(scores), _NEVER)
    chosen[among] = keep_chains_whole(scores[among], Selection(blocks, held.rows[among]).parents())
    return chosen


def _sinking(
    scores: Scores, blocks: BlockTable, held: Selection, tiers: Tiers, limit: int
) -> Places:
    """Places with a WARM copy and out of the pool, least worth keeping first."""
    idle = (tiers & int(Tier.HOT | Tier.WARM)) == int(Tier.WARM)
    if not idle.any():
        return np.empty(0, dtype=np.intp)
    return _highest(_tail_first(scores, blocks, held, idle), idle, limit)


def keep_chains_whole(scores: Scores, above: Places) -> Scores:
    """float64 ``[n]``: each score lowered below those of its descendants.

    A block that left before its child would strand it: the child's prefix could never match
    again. Pointer doubling: after round k every block knows the least score among descendants
    nearer than 2^(k+1), so a chain of depth d takes log2(d) rounds.

    Args:
        above: Where each one's parent stands; see ``Selection.parents``.
    """
    nobody = len(scores)
    lowest = np.append(scores, 0.0)
    step = _DEPTH_TIE
    while (above[:-1] != nobody).any():
        np.minimum.at(lowest, above[:-1], lowest[:-1] - step)
        above = np.take(above, above)
        step *= 2
    return lowest[:-1]


def _highest(scores: Scores, among: Mask, limit: int) -> Places:
    """Places of the ``limit`` highest scores where ``among`` is true, highest first."""
    places = np.flatnonzero(among)
    if places.size == 0 or limit <= 0:
        return places[:0]
    values = scores[places]
    if limit < len(places):
        bar = np.partition(values, len(places) - limit)[len(places) - limit]
        places, values = places[values >= bar], values[values >= bar]
    return places[np.argsort(-values, kind="stable")][:limit]


def _over_types(
    factor: float,
    columns: npt.NDArray[Any],
    profile: ScoreProfile,
    tables: Tables,
    picked: Selection,
) -> Term:
    """One weight and its values an edge type; types without an edge or a weight cost nothing."""
    return [
        (factor * weight, picked.of(columns[kind]))
        for kind, weight in profile.edge_types.items()
        if weight and tables.edges.counts[kind]
    ]


def _credit(tables: Tables, profile: ScoreProfile, picked: Selection, now: float) -> Scores:
    credit = tables.sessions.credit(now, profile.session_memory_s)
    claimed = of_session(credit, picked.of(tables.blocks.session))
    superseded = flagged(tables, picked, BlockFlag.SUPERSEDED)
    if superseded.any():
        claimed[superseded] = 0.0
    return claimed
