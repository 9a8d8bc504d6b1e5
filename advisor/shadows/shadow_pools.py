"""The pools that shadows simulate: LRU's, and those that policies rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from ...graph.ranking.policy import Policy, Scores
from ...graph.ranking.scoring import whole_scores
from ...graph.ranking.view import View
from ...graph.tables.blocks import Selection
from ...graph.types import Rows
from ..policies.shadow import Uses
from ..policies.trust import Trust
from .guarded_pool import GuardedPool
from .other_weights import OtherWeights

CAPACITIES: Final = (1.0, 0.75, 1.25, 2.0)
"""Of the live pool's: as it is, a quarter less and more, and twice."""

OTHERWISE: Final = "other weights"
"""The name of the shadow of weights that are not in force."""


Guarding = Callable[[int], Trust | None]
"""Gives what a guard thinks of the policy in a pool of so many blocks at first; None: no guard."""


class Counted(NamedTuple):
    """Blocks, of some requests.

    Attributes:
        asked, ours: That all sessions asked for, and of these what the live pool found.
        sampled: That sessions of the sample asked for.
        known, control: What LRU found in a pool as large as another: of ``asked``, of ``sampled``.
    """

    asked: int = 0
    ours: int = 0
    sampled: int = 0
    known: int = 0
    control: int = 0

    def since(self, before: Counted) -> Counted:
        """What was counted after ``before``."""
        return Counted(*(now - then for now, then in zip(self, before, strict=True)))


NOTHING: Final = Counted()


@dataclass(slots=True)
class LruPool:
    """A simulated pool under LRU, which follows all sessions: it needs no rankings, and is cheap.

    Attributes:
        capacity: Its size, as a factor of the live pool's.
        blocks: The same in blocks.
        found: Blocks that it found, of those that all sessions asked for.
        sampled_found: Of these, those that sessions of the sample asked for.
        has_tiers: Whether copies in colder tiers count: as so many blocks more.
    """

    name: str
    capacity: float
    blocks: int
    found: int = 0
    sampled_found: int = 0
    has_tiers: bool = False

    @property
    def policy_name(self) -> str:
        return "lru"


@dataclass(slots=True)
class PolicyPool:
    """A simulated pool that a policy ranks, guarded as the live one is, which follows a sample of
    sessions.

    Attributes:
        policy_name: Who ranks it.
        scores: Of blocks, under the rules, chains whole; higher goes first.
        beside: LRU in a pool as large, by which its sample stands for all.
        found: Blocks that it found, of those that the sample asked for.
        since: When it began, if that was later than the others; ``before``: what had been counted
            by then.
    """

    name: str
    policy_name: str
    scores: Callable[[View, Selection], Scores]
    beside: LruPool
    pool: GuardedPool
    found: int = 0
    since: float | None = None
    before: Counted = NOTHING

    @property
    def capacity(self) -> float:
        return self.beside.capacity

    @property
    def has_tiers(self) -> bool:
        return self.beside.has_tiers

    def rank(self, view: View) -> None:
        """Rank what it holds."""

        def scores(rows: Rows) -> Scores:
            return self.scores(view, Selection(view.blocks, rows))

        self.pool.rank(view.blocks.keys, scores)


def for_all(found: int, control: int, sampled: int, known: int, asked: int) -> float | None:
    """The share of all blocks that a shadow of a sample would have found; None before any.

    A sample's sessions find more or less than all do, whoever keeps the pool. So only what a shadow
    found beside LRU is taken from the sample, and what LRU found from all: a difference estimator
    (W. G. Cochran, Sampling Techniques, 7.3).

    Args:
        found, control: Of the ``sampled`` blocks that the sample asked for: what the shadow found,
            and what LRU did in a pool as large, which all sessions shared.
        known: What LRU found there of the ``asked`` blocks of all sessions.
    """
    if not asked:
        return None
    beside = (found - control) / sampled if sampled else 0.0
    return min(1.0, max(0.0, known / asked + beside))


def size_of(pool: LruPool | PolicyPool) -> int:
    """Its blocks, and those of its tiers."""
    return (pool if isinstance(pool, LruPool) else pool.beside).blocks


def in_sample(name: str) -> str:
    """Under which name steps count what an LRU pool found of the sample."""
    return f"{name} in the sample"


def lru_pool(blocks: int, capacity: float) -> LruPool:
    """A pool under LRU, so many times as large as one of ``blocks``."""
    return LruPool(_name("lru", capacity), capacity, round(blocks * capacity))


def policy_pools(
    pools: Sequence[LruPool], policies: Sequence[Policy], guard: Guarding, uses: Uses
) -> list[PolicyPool]:
    """The live policy at every size, the others at the live pool's."""
    return [
        policy_pool(pool, _name(policy.name, pool.capacity), policy, guard, uses)
        for place, policy in enumerate(policies)
        for pool in (pools if place == 0 else pools[:1])
    ]


def policy_pool(
    beside: LruPool, name: str, policy: Policy, guard: Guarding, uses: Uses
) -> PolicyPool:
    """A policy's pool, as large as one of LRU.

    What leaves a pool and is copied is found as if it had stayed: so pool and tiers are one pool,
    as large as both.
    """

    def scores(view: View, picked: Selection) -> Scores:
        return whole_scores(view, policy, picked)

    pool = GuardedPool(beside.blocks, guard(beside.blocks), uses)
    return PolicyPool(name, policy.name, scores, beside, pool)


def otherwise_pool(
    beside: LruPool, weights: OtherWeights, guard: Guarding, uses: Uses, view: View, before: Counted
) -> PolicyPool:
    """A pool that begins now, ranked by weights that are not in force."""
    pool = GuardedPool(beside.blocks, guard(beside.blocks), uses)
    scores = weights.whole_scores
    return PolicyPool(OTHERWISE, OTHERWISE, scores, beside, pool, since=view.now, before=before)


def _name(policy: str, capacity: float) -> str:
    return policy if capacity == 1.0 else f"{policy} ×{capacity:g}"
