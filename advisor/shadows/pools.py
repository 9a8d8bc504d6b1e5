"""The simulated pools: LRU's, and those that policies rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from ...graph.compiled import core
from ...graph.kvcache_graph import KVCacheGraph
from ...graph.ranking.order import resident_scores, whole_scores
from ...graph.ranking.policy import Policy, Rules, Scores, View, Weighted, Weights
from ...graph.tables.blocks import Selection
from ...graph.types import Keys, Rows
from ..policies.evidence import PolicySelector
from ..policies.registry import weighing
from ..policies.shadow import RankedShadow

# ``GuardedPool``: a simulated pool that a policy ranks while it finds more than LRU there.


class GuardedPool:
    """A simulated pool of another size, or ranked otherwise, with a guard of its own as the live
    pool has; see ``policies.guard``.

    While LRU ranks it, the policy is judged by what it would hold on its own.
    """

    def __init__(
        self, capacity: int, selector: PolicySelector | None, uses: core.RankedPools
    ) -> None:
        self._held, self._alone = RankedShadow(capacity, uses), RankedShadow(capacity, uses)
        self._selector = selector
        if self._policy_ranks:
            self._alone.leave()

    @property
    def is_guarded(self) -> bool:
        """Whether LRU ranks if it finds more."""
        return self._selector is not None

    @property
    def _policy_ranks(self) -> bool:
        return self._selector is None or self._selector.trusted

    @property
    def capacity(self) -> int:
        return self._held.capacity

    def resize(self, capacity: int) -> None:
        self._held.capacity = self._alone.capacity = capacity
        if self._selector is not None:
            self._selector.capacity = capacity

    def found(self, there: list[int], by_lru: int, walked: int) -> int:
        """Return how many blocks are held, from the first on without a gap."""
        found = there[self._held.number]
        if self._selector is not None:
            by_policy = found if self._selector.trusted else there[self._alone.number]
            self._selector.note(by_policy - by_lru, walked)
        return found

    def start(self, rows: Rows, keys: Keys) -> None:
        """Hold these blocks from now on, the most recently used first, whatever related pools
        hold.
        """
        self._held.restart(rows, keys)
        if not self._policy_ranks:
            self._alone.restart(rows, keys)

    def leave(self) -> None:
        self._held.leave()
        self._alone.leave()

    def rank(self, keys: Keys, scores: Callable[[Rows], Scores]) -> None:
        """Rank by policy or LRU, whichever found more, and update the policy's ranking."""
        if self._selector is not None and self._selector.is_due_for_change():
            self._selector.change_hands()
            if self._selector.trusted:
                self._alone.leave()
            else:
                self._begin_under_lru(keys)
        ranked = self._held if self._policy_ranks else self._alone
        rows = ranked.rows(keys)
        ranked.adopt(rows, scores(rows))

    def _begin_under_lru(self, keys: Keys) -> None:
        self._held.use_up()
        rows = self._held.rows(keys)
        self._alone.restart(rows, keys[rows])


# ``OtherWeights``: a policy as it would score with weights and rules that are not in use.


@dataclass(frozen=True, slots=True)
class OtherWeights:
    """A policy with other weights and rules, which shares what the policy learns. Called under the
    graph's lock: the policy has these weights while it scores.
    """

    policy: Policy
    weights: Weights | None  # None for a policy that uses none
    rules: Rules
    said: str = ""  # description of the weights

    @classmethod
    def in_force(cls, graph: KVCacheGraph, said: str = "") -> OtherWeights:
        """Return the weights and rules that a graph has now, kept while others are tried."""
        policy = graph.policy
        weights = policy.weights if isinstance(policy, Weighted) else None
        return cls(policy, weights, graph.rules, said)

    def resident_scores(self, view: View) -> tuple[Rows, Scores]:
        with weighing(self.policy, self.weights):
            return resident_scores(replace(view, rules=self.rules), self.policy)

    def whole_scores(self, view: View, picked: Selection) -> Scores:
        with weighing(self.policy, self.weights):
            return whole_scores(replace(view, rules=self.rules), self.policy, picked)


CAPACITIES: Final = (1.0, 0.75, 1.25, 2.0)
"""Relative to the live pool: the same size, a quarter less and more, and twice."""

OTHERWISE: Final = "other weights"  # name of the simulated pool whose weights are not in use


Guarding = Callable[[int], PolicySelector | None]
"""Creates the guard of a simulated pool of this many blocks; None: no guard."""


class FoundCounts(NamedTuple):
    # ``asked``, ``ours``: blocks requested by all sessions, and those that the live pool found.
    asked: int = 0
    ours: int = 0
    sampled: int = 0  # blocks requested by sessions of the sample
    # ``known``, ``control``: blocks that LRU found in a pool of the same size: of ``asked``, and of
    # ``sampled``.
    known: int = 0
    control: int = 0

    def since(self, before: FoundCounts) -> FoundCounts:
        return FoundCounts(*(now - then for now, then in zip(self, before, strict=True)))


NOTHING: Final = FoundCounts()


@dataclass(slots=True)
class LruPool:
    """A simulated pool under LRU, which follows all sessions; it needs no rankings and is cheap."""

    name: str
    capacity: float  # its size, as a factor of the live pool's
    blocks: int  # the same in blocks
    found: int = 0  # blocks that it found, of those requested by all sessions
    sampled_found: int = 0  # of these, blocks requested by the sample
    has_tiers: bool = False  # whether copies in colder tiers count, as additional blocks

    @property
    def policy_name(self) -> str:
        return "lru"


@dataclass(slots=True)
class PolicyPool:
    """A simulated pool that a policy ranks, guarded as the live one; it follows a sample."""

    name: str
    policy_name: str  # the policy that ranks it
    # Scores of blocks under the rules, chains whole; higher is evicted first.
    scores: Callable[[View, Selection], Scores]
    beside: LruPool  # LRU in a pool of the same size, which relates the sample to all sessions
    pool: GuardedPool
    found: int = 0  # blocks that it found, of those requested by the sample
    # When it started, if later than the others; ``before``: what had been counted by then.
    since: float | None = None
    before: FoundCounts = NOTHING

    @property
    def capacity(self) -> float:
        return self.beside.capacity

    @property
    def has_tiers(self) -> bool:
        return self.beside.has_tiers

    def rank(self, view: View) -> None:
        blocks = view.blocks
        self.pool.rank(blocks.keys, lambda rows: self.scores(view, Selection(blocks, rows)))


def for_all(found: int, control: int, sampled: int, known: int, asked: int) -> float | None:
    """Return the share of all blocks that the simulated pool would have found; None before any.

    A sample's sessions find more or less than all sessions do, under any order. So only the
    difference to LRU is taken from the sample, and LRU's hits from all sessions: a difference
    estimator (W. G. Cochran, Sampling Techniques, 7.3).

    Args:
        found, control: Of the ``sampled`` blocks requested by the sample, those that the simulated
            pool found, and those that LRU found in a pool of the same size shared by all sessions.
        known: Blocks that LRU found there, of the ``asked`` blocks of all sessions.
    """
    if not asked:
        return None
    beside = (found - control) / sampled if sampled else 0.0
    return min(1.0, max(0.0, known / asked + beside))


def size_of(pool: LruPool | PolicyPool) -> int:
    return (pool if isinstance(pool, LruPool) else pool.beside).blocks


def in_sample(name: str) -> str:
    """Return the name under which an LRU pool's hits for the sample are counted in steps."""
    return f"{name} in the sample"


def lru_pool(blocks: int, capacity: float) -> LruPool:
    return LruPool(_name("lru", capacity), capacity, round(blocks * capacity))


def policy_pools(
    pools: Sequence[LruPool], policies: Sequence[Policy], guard: Guarding, uses: core.RankedPools
) -> list[PolicyPool]:
    """Return pools for the live policy at every size, and for the others at the live pool's
    size.
    """
    return [
        policy_pool(pool, _name(policy.name, pool.capacity), policy, guard, uses)
        for place, policy in enumerate(policies)
        for pool in (pools if place == 0 else pools[:1])
    ]


def policy_pool(
    beside: LruPool, name: str, policy: Policy, guard: Guarding, uses: core.RankedPools
) -> PolicyPool:
    """Return a policy's pool, as large as one of LRU. A block that leaves a pool and is copied is
    found as if it had stayed: so pool and tiers are one pool of their total size.
    """
    pool = GuardedPool(beside.blocks, guard(beside.blocks), uses)
    return PolicyPool(
        name, policy.name, lambda view, picked: whole_scores(view, policy, picked), beside, pool
    )


def otherwise_pool(
    beside: LruPool,
    weights: OtherWeights,
    guard: Guarding,
    uses: core.RankedPools,
    view: View,
    before: FoundCounts,
) -> PolicyPool:
    """Return a pool that starts now, ranked by weights that are not in use."""
    pool = GuardedPool(beside.blocks, guard(beside.blocks), uses)
    scores = weights.whole_scores
    return PolicyPool(OTHERWISE, OTHERWISE, scores, beside, pool, since=view.now, before=before)


def _name(policy: str, capacity: float) -> str:
    return policy if capacity == 1.0 else f"{policy} ×{capacity:g}"
