"""``Policy``: scores the blocks that an engine may lose, in the live sidecar and in the replay lab.
The rules that bind every policy (superseded first, protected last, a chain tail first) are laid
over its scores by ``rules.lay_rules``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from ..errors import GraphError
from ..tables.blocks import BlockTable, Selection
from ..tables.sessions import SessionTable
from ..tables.tables import Tables
from ..types import NO_ROW, PROTECTED_LAYERS, EdgeType, Rows, SourceLayer

# What a person may configure of a ranking: a score's weights, and the rules that bind all
# scores.

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
    """Weights and rules in one object, which may be passed for either."""


# ``View``: all that one ranking is computed from.


@dataclass(frozen=True, slots=True)
class View:
    """The columns, the rules, the engine whose pool is meant, and the time.

    Made once per ranking, and passed on whole. Its holder reads the columns and writes none.

    Attributes:
        engine: A residency column; ``NO_ROW`` for a question about no engine in particular.
        now: Monotonic seconds of the graph's clock.
        kept_share: Of a pool, that may be kept whatever scores say, for whoever asks what would be
            if it were another; None: what holds.
        lock: The graph's. Whoever makes a ranking holds it while they read columns, and not while
            they rank what they copied.
    """

    tables: Tables
    rules: Rules
    engine: int
    now: float
    kept_share: float | None = None
    lock: AbstractContextManager[Any] = field(default_factory=nullcontext)

    @property
    def blocks(self) -> BlockTable:
        """The columns of blocks."""
        return self.tables.blocks

    @property
    def sessions(self) -> SessionTable:
        """The columns of sessions."""
        return self.tables.sessions

    def of(self, engine: int) -> View:
        """The same moment, for another engine."""
        return replace(self, engine=engine)


Scores = npt.NDArray[np.float64]


class ScoredRuns(NamedTuple):
    """Runs of blocks in consecutive rows, each of which scores ``DEPTH_TIE`` more than the one
    before it in its run.
    """

    rows: Rows  # the first of each
    scores: Scores  # of these
    lengths: npt.NDArray[np.int64] | None  # blocks of each; None: one


Terms = dict[str, Scores]
"""The parts of scores by their names, each ``[n]``; a score is their sum, apart from the tie by
depth."""


class Policy(Protocol):
    """Scores blocks from the graph's columns; may learn from them as they change.

    Called under the graph's lock; see also ``Detachable`` and ``Learner``. A policy with a memory
    learns in ``observe`` from what changed in the columns since its last look; it needs no events
    of its own.
    """

    @property
    def name(self) -> str:
        """The policy's name in configuration and replay."""

    def observe(self, view: View) -> None:
        """Learn from the columns, once before each ranking of an engine."""

    def scores(self, view: View, picked: Selection) -> Scores:
        """float64 ``[len(picked)]``, higher goes first; changes nothing.

        A score beyond ``rules.SCORE_BOUND`` is clipped to it; NaN counts as the median.

        Args:
            picked: Rows that the view's engine holds in some tier.
        """

    def terms(self, view: View, picked: Selection) -> Terms:
        """The parts of each picked block's score, for people; changes nothing.

        Args:
            view: Of no engine in particular.
        """


def terms_of(policy: Policy, view: View, picked: Selection) -> Terms:
    """A policy's terms, which somebody else may have written, in a view of an engine or of none;
    raises GraphError unless they are one number for each picked block.
    """
    terms = policy.terms(view.of(NO_ROW), picked)
    shapes = {name: np.shape(each) for name, each in terms.items()}
    if wrong := [f"{name} {shape}" for name, shape in shapes.items() if shape != (len(picked),)]:
        raise GraphError(
            f"the policy {policy.name} must tell one number for each of {len(picked)} blocks per "
            f"term; these have other shapes: {', '.join(wrong)}"
        )
    return terms


@runtime_checkable
class Weighted(Protocol):
    """A policy with configured weights, which may be assigned while it runs."""

    weights: Weights


class Learner(Protocol):
    """A policy that learns for longer than others should wait."""

    def look(self, view: View) -> Callable[[], None]:
        """``observe`` in two parts: this one reads the columns, under the graph's lock; what it
        returns learns from what was read, and is called without the lock.
        """


class Detachable(Protocol):
    """A policy whose present knowledge can be copied, to score without the graph's lock."""

    def detached(self, view: View, sessions: Rows) -> Policy:
        """Return a policy that scores as this one does now, whatever this one learns later.

        Called under the graph's lock; what it returns is asked without it, about copies. Blocks
        that are alike but for their depth must differ by ``DEPTH_TIE`` a block. Where what it
        returns has ``ends``, int32 ``[sessions + 1]``, that need not hold across that depth of a
        block's session, the last one for blocks of none.

        Args:
            sessions: int32 ``[n]``: the session of each block that will be asked about; repeats
                allowed, ``NO_ROW`` for none.
        """


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """Whether the policy or LRU ranks an engine's blocks, and on what evidence; for pages and logs.

    Attributes:
        policy_rules: Whether the policy ranks; otherwise LRU does.
        ahead: How many more blocks the policy found than LRU since the last change; negative if LRU
            found more.
        changes: How often one took over from the other.
    """

    policy_rules: bool
    ahead: float
    changes: int


class Referee(Protocol):
    """Says, engine by engine, whether a policy may rank (otherwise the engine's own order holds),
    and how much may be kept whatever scores say.

    ``watch`` is called without the graph's lock, and takes the view's while it reads columns.
    """

    @property
    def yields(self) -> bool:
        """Whether LRU ranks where the policy finds less; otherwise the policy ranks everywhere."""

    def watch(self, view: View, scores: Callable[[View, Selection], ScoredRuns]) -> None:
        """Compare what was found since the last ranking of an engine, by the policy's ``scores`` of
        any rows, under a view's rules, chains whole; higher goes first. Say in ``Tables.budgets``
        how much of its pool may be kept whatever scores say.
        """

    def trusts(self, engine: int) -> bool:
        """Whether the policy ranks this engine's blocks now."""

    def forget(self, engine: int) -> None:
        """Forget an engine that is gone: the next one in its column has shown nothing yet."""

    def policy_choices(self) -> dict[int, PolicyChoice]:
        """Who ranks each engine that is watched, by residency column."""
