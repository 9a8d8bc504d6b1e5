"""What a person may configure of a ranking: a score's weights, and the rules that bind all
scores."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from ..types import PROTECTED_LAYERS, EdgeType, SourceLayer

_DEFAULT_EDGE_TYPES: Final = {
    EdgeType.PREFIX_SHARE: 1.0,
    EdgeType.CO_ATTEND: 1.0,
    EdgeType.SEMANTIC: 0.5,
    EdgeType.TEMPORAL: 0.1,
    EdgeType.SPILL_LINK: 0.0,
    EdgeType.MEMORY_REF: 1.0,
}


@dataclass(frozen=True)
class Weights:
    """Weights of a score's terms; each policy has its own.

    ``score = age·seconds + degree·Σ wₜ·degreeₜ + edge_weight·Σ wₜ·weightₜ + importance·importance +
    confidence·surer + hit_count·hits + session_credit·credit``, with ``wₜ`` of
    ``Rules.edge_types``. The defaults are chosen, in the replay lab.

    Attributes:
        confidence: Weight of how much surer than the mean of all sampled sessions the model was, in
            [-1, 1], when it last wrote to the session that last walked a block: while the model
            doubts, more of what it reads is kept.
        session_credit: Weight of the claim, in [0, 1], of the session that last walked a block.
    """

    age: float = 0.01
    degree: float = -5.0
    edge_weight: float = -2.0
    importance: float = -20.0
    confidence: float = 20.0
    hit_count: float = -3.0
    session_credit: float = -40.0


@dataclass(frozen=True)
class Rules:
    """What holds in a graph, whichever policy scores its blocks.

    Attributes:
        session_memory_s: Idle seconds over which a session's claim fades to 1/e. Chosen.
        edge_types: wₜ: the weight of an edge of each type, in policies and for prefetching.
        protected_layers: Never evicted while an unprotected block exists.
        protected_share: Share of a pool that may be protected in all; beyond it the least wanted
            lose their protection; leases count as well. None: as much as costs
            ``protected_price_points`` at most.
        protected_price_points: What protection may cost: hundredths of the prompt blocks that are
            asked for, which would be found if nothing were protected. Where LRU rules, it may cost
            nothing. Chosen: what an operator would not notice.
        tenant_share: Share of a pool that one named tenant may protect, and half of what all may
            together where ``protected_share`` is None. Chosen: two tenants cannot take all that may
            be protected from a third.
        inferred_share: Share of a pool within which system texts are protected of which nobody said
            so, each that several requests began with, for ``LATELY_S`` after its last use. Where
            they take more together, none is: many heads live by being asked for, and to keep some
            of them costs recorded agents hits. Chosen.
        reserved: Blocks of each pool that are kept for sessions which come back; below 1 a share of
            the pool.
        horizon_s: A session that is expected back within these seconds is due.
    """

    session_memory_s: float = 300.0
    edge_types: dict[EdgeType, float] = field(default_factory=lambda: dict(_DEFAULT_EDGE_TYPES))
    protected_layers: frozenset[SourceLayer] = PROTECTED_LAYERS
    protected_share: float | None = None
    protected_price_points: float = 0.5
    tenant_share: float = 0.25
    inferred_share: float = 1 / 16
    reserved: float = 0.0
    horizon_s: float = 3.0


@dataclass(frozen=True)
class ScoreProfile(Rules, Weights):
    """Weights and rules in one, for whoever sets both: it may stand for either."""
