"""What a ranking means: the eviction score, and the three rules that bind every policy.

Higher scores go first. All of it is vector expressions over columns; nothing here walks edges
or visits a block at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from .blocks import BlockTable
from .tables import Tables
from .types import (
    NO_ROW,
    NUM_EDGE_TYPES,
    PROTECTED_LAYERS,
    BlockFlag,
    EdgeType,
    Keys,
    Rows,
    SessionState,
    SourceLayer,
    Tier,
)

Scores = npt.NDArray[np.float64]
_T = TypeVar("_T", bound=np.generic)
Mask = npt.NDArray[np.bool_]

# The rules shift a score by more than any weights can: first the superseded, then what a session
# that is over leaves behind, then everything else, then pinned blocks, protected ones last.
SUPERSEDED_SHIFT: Final = 2e8
OVER_SHIFT: Final = 1e8
PINNED_SHIFT: Final = -1e8
PROTECTED_SHIFT: Final = -1e9
# Of equal scores the deeper block goes first, as when vLLM frees a request tail first.
_DEPTH_TIE: Final = 1e-5
_NEVER: Final = -np.inf

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


@dataclass(frozen=True, slots=True, eq=False)
class Ranking:
    """Block keys of one engine, evict first → evict last; see ``advice.EvictionRanking``."""

    order: Keys
    protected: Keys
    spill_first: Keys


def score_terms(tables: Tables, profile: ScoreProfile, now: float) -> dict[str, Scores]:
    """Each term of the score, float64 ``[blocks.size]``."""
    blocks = tables.blocks
    size = blocks.size
    return {
        "age": profile.age * (now - blocks.last_used()),
        "degree": profile.degree * _over_types(blocks.degree, profile, tables, size),
        "edge_weight": profile.edge_weight * _over_types(blocks.edge_weight, profile, tables, size),
        "importance": profile.importance * blocks.importance[:size].astype(np.float64),
        "hit_count": profile.hit_count * blocks.hit_count[:size].astype(np.float64),
        "session_credit": profile.session_credit * _credit(tables, profile, now),
    }


def eviction_scores(tables: Tables, profile: ScoreProfile, now: float) -> Scores:
    """float64 ``[blocks.size]``: the score of every row, rules' shifts included."""
    blocks = tables.blocks
    terms = iter(score_terms(tables, profile, now).values())
    scores = next(terms)
    for term in terms:
        scores += term
    scores += _DEPTH_TIE * blocks.depth[: blocks.size]
    for rule, shift in _RULES.items():
        scores += shift * rule(tables, profile, now)
    return scores


def is_superseded(tables: Tables, profile: ScoreProfile, now: float) -> Mask:
    """Only an abandoned branch used it."""
    blocks = tables.blocks
    return np.asarray((blocks.flags[: blocks.size] & int(BlockFlag.SUPERSEDED)) != 0)


def is_over(tables: Tables, profile: ScoreProfile, now: float) -> Mask:
    """Only sessions that ended used it."""
    blocks, sessions = tables.blocks, tables.sessions
    session = blocks.session[: blocks.size]
    exclusive = (blocks.flags[: blocks.size] & int(BlockFlag.SHARED)) == 0
    ended = sessions.state[: sessions.size] == SessionState.ENDED
    return np.asarray(_of_session(ended, session) & exclusive)


def is_pinned(tables: Tables, profile: ScoreProfile, now: float) -> Mask:
    """A lease on it has not run out."""
    return np.asarray(tables.blocks.pinned_until[: tables.blocks.size] > now)


def is_protected(tables: Tables, profile: ScoreProfile, now: float) -> Mask:
    """Its layer is protected."""
    protected = np.zeros(256, dtype=np.bool_)
    protected[[int(layer) for layer in profile.protected_layers]] = True
    return protected[tables.blocks.layer[: tables.blocks.size]]


_RULES: Final = {
    is_superseded: SUPERSEDED_SHIFT,
    is_over: OVER_SHIFT,
    is_pinned: PINNED_SHIFT,
    is_protected: PROTECTED_SHIFT,
}


def rank(tables: Tables, profile: ScoreProfile, engine: int, limit: int, now: float) -> Ranking:
    """The ``limit`` blocks that this engine should lose first, and its protected ones."""
    blocks = tables.blocks
    scores = eviction_scores(tables, profile, now)
    scores[~blocks.resident(engine)] = _NEVER
    keep_chains_whole(scores, blocks)
    victims = _top(scores, PROTECTED_SHIFT / 2, np.inf, limit)
    protected = _top(scores, _NEVER, PROTECTED_SHIFT / 2, limit)
    cold = (blocks.tiers[engine, victims] & int(Tier.WARM | Tier.COLD)) == 0
    return Ranking(blocks.keys[victims], blocks.keys[protected], blocks.keys[victims[cold]])


def keep_chains_whole(scores: Scores, blocks: BlockTable) -> None:
    """Lower each block's score, in place, below those of its resident children.

    A block that left before its child would strand it: the child's prefix could never match
    again. ``-inf`` marks what is not resident. Works up from the children that are out of order,
    level by level, so that chains already in order cost one comparison.
    """
    parent = blocks.parent[: len(scores)]
    child = np.flatnonzero((parent != NO_ROW) & (scores > _NEVER)).astype(np.int32)
    while child.size:
        above = parent[child]
        limit = scores[child] - _DEPTH_TIE
        late = (scores[above] > limit) & (scores[above] > _NEVER)
        above, limit = above[late], limit[late]
        np.minimum.at(scores, above, limit)
        raised = np.unique(above)
        child = raised[parent[raised] != NO_ROW].astype(np.int32)


def _top(scores: Scores, above: float, up_to: float, limit: int) -> Rows:
    """Rows with ``above < score <= up_to``, the highest ``limit`` of them, highest first."""
    rows = np.flatnonzero((scores > above) & (scores <= up_to)).astype(np.int32)
    if len(rows) > limit:
        rows = rows[np.argpartition(-scores[rows], limit - 1)[:limit]]
    return rows[np.argsort(-scores[rows], kind="stable")]


def _over_types(
    column: npt.NDArray[np.uint16] | npt.NDArray[np.float32],
    profile: ScoreProfile,
    tables: Tables,
    size: int,
) -> Scores:
    """Σ over edge types of weight × column; types without an edge or a weight cost nothing."""
    total = np.zeros(size, dtype=np.float64)
    for kind in range(NUM_EDGE_TYPES):
        weight = profile.edge_types.get(EdgeType(kind), 0.0)
        if weight and tables.edges.counts[kind]:
            total += weight * column[kind, :size]
    return total


def _credit(tables: Tables, profile: ScoreProfile, now: float) -> Scores:
    blocks = tables.blocks
    credit = tables.sessions.credit(now, profile.session_memory_s)
    claimed = _of_session(credit, blocks.session[: blocks.size])
    claimed[(blocks.flags[: blocks.size] & int(BlockFlag.SUPERSEDED)) != 0] = 0.0
    return claimed


def _of_session(values: npt.NDArray[_T], session: Rows) -> npt.NDArray[_T]:
    """``values[session]``, and zero for blocks of no session."""
    padded = np.zeros(len(values) + 1, dtype=values.dtype)  # the last one stands for NO_ROW
    padded[:-1] = values
    return padded[session]
