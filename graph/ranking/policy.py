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

# What a person may configure of a ranking: a score's weights, and the rules that bind all scores.

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
        confidence: Weight of how much the model's confidence, when it last wrote to the session
            that last walked a block, exceeded the mean of all sampled sessions, in [-1, 1]: while
            the model is unsure, more of what it reads is kept.
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
    """The rules for rankings in a graph, whichever policy scores its blocks.

    Attributes:
        session_memory_s: Idle seconds after which a session's claim has faded to 1/e. Chosen.
        edge_types: wₜ: the weight of an edge of each type, in policies and for prefetching.
        protected_layers: Layers never evicted while an unprotected block exists.
        protected_share: Share of a pool that may be protected in all, including leases; beyond it
            the least wanted blocks lose their protection. None: as much as costs
            ``protected_price_points`` at most.
        protected_price_points: Highest price of protection, in hundredths of the requested prompt
            blocks that would be found if nothing were protected. Under LRU, protection may cost
            nothing. Chosen: what an operator would not notice.
        tenant_share: Share of a pool that one named tenant may protect, and at most half of what
            all may protect together if ``protected_share`` is None. Chosen: two tenants cannot take
            all protection from a third.
        inferred_share: Share of a pool within which inferred system texts are protected: those with
            which several requests began, for ``LATELY_S`` after their last use. If they take more
            in all, none is protected: when there are many, their use keeps them, and protecting
            some costs recorded agents hits. Chosen.
        reserved: Blocks of each pool kept for sessions that returned before; below 1, a share of
            the pool.
        horizon_s: A session expected to return within these seconds is due.
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
    """Weights and rules in one object, which may be passed as either."""


# ``View``: everything from which a ranking is computed.


@dataclass(frozen=True, slots=True)
class View:
    """The columns, the rules, an engine, and the time.

    Made once per ranking and passed as a whole. Users read the columns and write none.

    Attributes:
        engine: A residency column; ``NO_ROW`` if the question concerns no engine in particular.
        now: Monotonic seconds of the graph's clock.
        kept_share: Share of the pool that may be kept whatever the scores are, for hypothetical
            questions; None: the real one.
        lock: The graph's lock. Rankings hold it while they read columns, and not while they rank
            their copies.
    """

    tables: Tables
    rules: Rules
    engine: int
    now: float
    kept_share: float | None = None
    lock: AbstractContextManager[Any] = field(default_factory=nullcontext)

    @property
    def blocks(self) -> BlockTable:
        """The block table."""
        return self.tables.blocks

    @property
    def sessions(self) -> SessionTable:
        """The session table."""
        return self.tables.sessions

    def of(self, engine: int) -> View:
        """Return a view of the same moment, for another engine."""
        return replace(self, engine=engine)


Scores = npt.NDArray[np.float64]


class ScoredRuns(NamedTuple):
    """Runs of blocks in consecutive rows, in which each block scores ``DEPTH_TIE`` more than the
    one before it.
    """

    rows: Rows  # first row of each run
    scores: Scores  # scores of these rows
    lengths: npt.NDArray[np.int64] | None  # blocks of each run; None: one


Terms = dict[str, Scores]
"""The parts of scores by name, each ``[n]``; a score is their sum, apart from the tie-break by
depth.
"""


class Policy(Protocol):
    """Scores blocks from the graph's columns; may learn from them as they change.

    Called under the graph's lock; see also ``Detachable`` and ``Learner``. A policy with memory
    learns in ``observe`` from the changes in the columns since its last call; it needs no events of
    its own.
    """

    @property
    def name(self) -> str:
        """The policy's name in the configuration and the replay lab."""

    def observe(self, view: View) -> None:
        """Learn from the columns, once before each ranking of an engine."""

    def scores(self, view: View, picked: Selection) -> Scores:
        """Return scores, float64 ``[len(picked)]``, where higher is evicted first; changes nothing.

        A score beyond ``rules.SCORE_BOUND`` is clipped to it; NaN counts as the median.

        Args:
            picked: Rows that the view's engine holds in some tier.
        """

    def terms(self, view: View, picked: Selection) -> Terms:
        """Return the parts of each picked block's score, for people; changes nothing.

        Args:
            view: A view of no engine in particular.
        """


def terms_of(policy: Policy, view: View, picked: Selection) -> Terms:
    """Return the terms of a policy, perhaps a user's, in a view of an engine or of none; raises
    GraphError unless they are one number for each picked block.
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
    """A policy whose learning takes longer than others should wait for the lock."""

    def look(self, view: View) -> Callable[[], None]:
        """As ``observe``, in two parts: this call reads the columns under the graph's lock; the
        function that it returns learns from them, and is called without the lock.
        """


class Detachable(Protocol):
    """A policy whose present knowledge can be copied, to score without the graph's lock."""

    def detached(self, view: View, sessions: Rows) -> Policy:
        """Return a policy that scores as this one does now, whatever this one learns later.

        Called under the graph's lock; the returned policy is called without it, on copies. It must
        give blocks that differ only in depth scores that differ by ``DEPTH_TIE`` per block. If it
        has ``ends``, int32 ``[sessions + 1]``, this need not hold across that depth for blocks of
        that session; the last entry is for blocks without one.

        Args:
            sessions: int32 ``[n]``: the session of each block to be scored; repeats allowed,
                ``NO_ROW`` for none.
        """


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """Whether the policy or LRU ranks an engine's blocks, and on what evidence; for pages and logs.

    Attributes:
        policy_rules: Whether the policy ranks; otherwise LRU does.
        ahead: How many more blocks the policy found than LRU since the last change; negative if LRU
            found more.
        changes: How often the ranking changed between policy and LRU.
    """

    policy_rules: bool
    ahead: float
    changes: int


class Referee(Protocol):
    """Decides for each engine whether a policy may rank (otherwise the engine keeps its own order),
    and how much may be kept whatever the scores are.

    ``watch`` is called without the graph's lock, and takes the view's lock while it reads columns.
    """

    @property
    def yields(self) -> bool:
        """Whether LRU ranks where the policy finds less; otherwise the policy ranks everywhere."""

    def watch(self, view: View, scores: Callable[[View, Selection], ScoredRuns]) -> None:
        """Compare what policy and LRU found since the last ranking of an engine. ``scores`` returns
        the policy's scores of any rows under a view's rules, chains whole; higher goes first.
        Writes to ``Tables.budgets`` how much of the pool may be kept whatever the scores are.
        """

    def trusts(self, engine: int) -> bool:
        """Return whether the policy ranks this engine's blocks now."""

    def forget(self, engine: int) -> None:
        """Forget an engine that is gone, so that the next one in its column starts without
        evidence.
        """

    def policy_choices(self) -> dict[int, PolicyChoice]:
        """Return who ranks each watched engine, by residency column."""
