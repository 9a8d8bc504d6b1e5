"""What a ranking means: the eviction score, and the three rules that bind every policy.

Higher scores go first. All of it is vector expressions over columns; nothing here walks edges
or visits a block at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from .policy import Policy, Scores
from .spill import COPIES, worth_spilling
from .tables import Tables
from .types import (
    PROTECTED_LAYERS,
    BlockFlag,
    EdgeType,
    Keys,
    Rows,
    SessionState,
    SourceLayer,
    Tier,
)

_T = TypeVar("_T", bound=np.generic)
Mask = npt.NDArray[np.bool_]
Term = list[tuple[float, npt.NDArray[Any]]]

# The rules shift a score by more than any weights can: first the superseded, then what a session
# that is over leaves behind, then everything else, then what an engine with copies would have to
# bring back at once, then pinned blocks, protected ones last.
SUPERSEDED_SHIFT: Final = 2e8
OVER_SHIFT: Final = 1e8
DUE_SHIFT: Final = -5e7
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
    horizon_s: float = 3.0


@dataclass(frozen=True, slots=True, eq=False)
class Ranking:
    """Block keys of one engine, evict first → evict last; see ``advice.EvictionRanking``."""

    order: Keys
    protected: Keys
    spill_first: Keys
    sink_first: Keys


def score_terms(tables: Tables, profile: ScoreProfile, now: float) -> dict[str, Term]:
    """The score's terms: each a list of weights and the columns that they multiply."""
    blocks = tables.blocks
    return {
        "age": [(profile.age, now - blocks.last_used())],
        "degree": _over_types(profile.degree, blocks.degree, profile, tables),
        "edge_weight": _over_types(profile.edge_weight, blocks.edge_weight, profile, tables),
        "importance": [(profile.importance, blocks.importance)],
        "hit_count": [(profile.hit_count, blocks.hit_count)],
        "session_credit": [(profile.session_credit, _credit(tables, profile, now))],
    }


class ClassicPolicy:
    """The weighted sum of ``ScoreProfile``."""

    name: Final = "classic"

    def __init__(self, profile: ScoreProfile | None = None) -> None:
        self.profile = profile or ScoreProfile()

    def observe(self, tables: Tables, engine: int, now: float) -> None:
        """Nothing to learn: the weights are configuration."""

    def scores(self, tables: Tables, engine: int, now: float) -> Scores:
        """float64 ``[blocks.size]``; the same on every engine."""
        size = tables.blocks.size
        scores = np.multiply(tables.blocks.depth[:size], _DEPTH_TIE, dtype=np.float64)
        scratch = np.empty(size)
        for term in score_terms(tables, self.profile, now).values():
            for weight, column in term:
                scores += np.multiply(column[:size], weight, out=scratch)
        return scores

    def terms(self, tables: Tables, row: int, now: float) -> dict[str, float]:
        """Every term of the sum."""
        return {
            name: sum(weight * float(column[row]) for weight, column in term)
            for name, term in score_terms(tables, self.profile, now).items()
        }


def shift_by_rules(scores: Scores, tables: Tables, profile: ScoreProfile, now: float) -> None:
    """Lay the rules over a policy's scores, in place."""
    scratch = np.empty(len(scores))
    for rule, shift in _RULES.items():
        applies = rule(tables, profile, now)
        if applies.any():
            scores += np.multiply(applies, shift, out=scratch)


def is_superseded(tables: Tables, profile: ScoreProfile, now: float) -> Mask:
    """Only an abandoned branch used it."""
    return _flagged(tables, BlockFlag.SUPERSEDED)


def is_over(tables: Tables, profile: ScoreProfile, now: float) -> Mask:
    """Only sessions that ended used it."""
    blocks, sessions = tables.blocks, tables.sessions
    ended = sessions.state[: sessions.size] == SessionState.ENDED
    over = _of_session(ended, blocks.session[: blocks.size])
    over &= ~_flagged(tables, BlockFlag.SHARED)
    return over


def is_due(tables: Tables, profile: ScoreProfile, now: float) -> Mask:
    """Its session waits for a tool, and is expected back any moment."""
    blocks, sessions = tables.blocks, tables.sessions
    due = np.zeros(sessions.size, dtype=np.bool_)
    due[sessions.soon(profile.horizon_s, now)] = True
    return _of_session(due, blocks.session[: blocks.size])


def is_pinned(tables: Tables, profile: ScoreProfile, now: float) -> Mask:
    """A lease on it has not run out."""
    return np.asarray(tables.blocks.pinned_until[: tables.blocks.size] > now)


def is_protected(tables: Tables, profile: ScoreProfile, now: float) -> Mask:
    """Its layer is protected."""
    protected = np.zeros(256, dtype=np.bool_)
    protected[[int(layer) for layer in profile.protected_layers]] = True
    return np.take(protected, tables.blocks.layer[: tables.blocks.size])


_RULES: Final = {
    is_superseded: SUPERSEDED_SHIFT,
    is_over: OVER_SHIFT,
    is_pinned: PINNED_SHIFT,
    is_protected: PROTECTED_SHIFT,
}


def rank(
    tables: Tables, policy: Policy, profile: ScoreProfile, engine: int, limit: int, now: float
) -> Ranking:
    """The ``limit`` blocks, protected blocks and copies that this engine should lose first."""
    blocks = tables.blocks
    scores = _ruled_scores(tables, policy, profile, engine, now)
    sinking = _sinking(scores, tables, engine, limit)
    scores = _tail_first(scores, tables, blocks.resident(engine))
    open_to_loss = scores > PROTECTED_SHIFT / 2
    victims = _highest(scores, open_to_loss, limit)
    protected = _highest(scores, ~open_to_loss & (scores > _NEVER), limit)
    spilling = np.concatenate([victims, protected])
    wanted = (np.take(blocks.tiers[engine], spilling) & COPIES) == 0
    wanted[: len(victims)] &= worth_spilling(tables, victims, now)
    spilling = spilling[wanted]
    named = (victims, protected, spilling, sinking)
    return Ranking(*(np.take(blocks.keys, rows) for rows in named))


def resident_scores(
    tables: Tables, policy: Policy, profile: ScoreProfile, engine: int, now: float
) -> Scores:
    """float64 ``[blocks.size]``: a policy's scores under the rules, chains tail first.

    ``-inf`` stands for what is not resident.
    """
    scores = _ruled_scores(tables, policy, profile, engine, now)
    return _tail_first(scores, tables, tables.blocks.resident(engine))


def _ruled_scores(
    tables: Tables, policy: Policy, profile: ScoreProfile, engine: int, now: float
) -> Scores:
    scores = policy.scores(tables, engine, now)
    shift_by_rules(scores, tables, profile, now)
    if (tables.blocks.tiers[engine, : len(scores)] & COPIES).any():
        # Without copies a loss is final for all alike, and the policy's own claim decides.
        scores += DUE_SHIFT * is_due(tables, profile, now)
    return scores


def _tail_first(scores: Scores, tables: Tables, among: Mask) -> Scores:
    """``scores``, changed in place: chains whole ``among`` some blocks, ``-inf`` for the others."""
    keep_chains_whole(scores, among, tables.blocks.parent[: len(scores)])
    scores[~among] = _NEVER
    return scores


def _sinking(scores: Scores, tables: Tables, engine: int, limit: int) -> Rows:
    """Rows with a WARM copy and out of the pool, least worth keeping first."""
    held = tables.blocks.tiers[engine, : len(scores)]
    idle = (held & int(Tier.HOT | Tier.WARM)) == int(Tier.WARM)
    if not idle.any():
        return np.empty(0, dtype=np.int32)
    return _highest(_tail_first(scores.copy(), tables, idle), idle, limit)


def keep_chains_whole(scores: Scores, resident: Mask, parent: Rows) -> None:
    """Lower each resident block's score, in place, below those of its resident descendants.

    A block that left before its child would strand it: the child's prefix could never match
    again. Pointer doubling over the resident rows: after round k every block knows the least
    score among descendants nearer than 2^(k+1), so a chain of depth d takes log2(d) rounds.
    """
    rows = np.flatnonzero(resident)
    nobody = len(rows)
    place = np.full(len(scores) + 1, nobody)  # the last one stands for NO_ROW
    place[rows] = np.arange(nobody)
    above = np.append(np.take(place, np.take(parent, rows), mode="wrap"), nobody)
    lowest = np.append(np.take(scores, rows), 0.0)
    step = _DEPTH_TIE
    while (above[:-1] != nobody).any():
        np.minimum.at(lowest, above[:-1], lowest[:-1] - step)
        above = np.take(above, above)
        step *= 2
    scores[rows] = lowest[:-1]


def _highest(scores: Scores, among: Mask, limit: int) -> Rows:
    """Rows of the ``limit`` highest scores where ``among`` is true, highest first."""
    rows = np.flatnonzero(among)
    if rows.size == 0 or limit <= 0:
        return np.empty(0, dtype=np.int32)
    values = scores[rows]
    if limit < len(rows):
        bar = np.partition(values, len(rows) - limit)[len(rows) - limit]
        rows, values = rows[values >= bar], values[values >= bar]
    return rows[np.argsort(-values, kind="stable")][:limit].astype(np.int32)


def _over_types(
    factor: float, columns: npt.NDArray[Any], profile: ScoreProfile, tables: Tables
) -> Term:
    """One weight and column an edge type; types without an edge or a weight cost nothing."""
    return [
        (factor * weight, columns[kind])
        for kind, weight in profile.edge_types.items()
        if weight and tables.edges.counts[kind]
    ]


def _flagged(tables: Tables, flag: BlockFlag) -> Mask:
    return np.asarray((tables.blocks.flags[: tables.blocks.size] & int(flag)) != 0)


def _credit(tables: Tables, profile: ScoreProfile, now: float) -> Scores:
    blocks = tables.blocks
    credit = tables.sessions.credit(now, profile.session_memory_s)
    claimed = _of_session(credit, blocks.session[: blocks.size])
    superseded = _flagged(tables, BlockFlag.SUPERSEDED)
    if superseded.any():
        claimed[superseded] = 0.0
    return claimed


def _of_session(values: npt.NDArray[_T], session: Rows) -> npt.NDArray[_T]:
    """``values[session]``, and zero for blocks of no session."""
    padded = np.append(values, values.dtype.type(0))  # the last one stands for NO_ROW
    return np.take(padded, session, mode="wrap")
