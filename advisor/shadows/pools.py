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
    # Blocks that were asked for, and of these what the live pool found.
    asked: int = 0
    ours: int = 0

    def since(self, before: FoundCounts) -> FoundCounts:
        return FoundCounts(self.asked - before.asked, self.ours - before.ours)


NOTHING: Final = FoundCounts()


@dataclass(slots=True)
class LruPool:
    """A simulated pool under LRU, which needs no rankings, and is cheap."""

    name: str
    capacity: float  # its size, as a factor of the live pool's
    blocks: int  # the same in blocks
    found: int = 0  # blocks that it found, of those that were asked for
    has_tiers: bool = False  # whether copies in colder tiers count, as additional blocks

    @property
    def policy_name(self) -> str:
        return "lru"


class PolicyPool:
    """A simulated pool that a policy ranks while it finds more than LRU there, as the guard of the
    live pool has it. While LRU rules, the policy proves itself on what it would hold alone.
    """

    def __init__(
        self,
        name: str,
        policy_name: str,  # who ranks it
        # of blocks, under the rules, chains whole; higher goes first
        scores: Callable[[View, Selection], Scores],
        beside: LruPool,  # LRU in a pool as large
        selector: PolicySelector | None,  # None: no guard
        uses: core.RankedPools,  # what all policies' pools follow
    ) -> None:
        self.name, self.policy_name, self.beside = name, policy_name, beside
        self.selector, self._scores = selector, scores
        self.found = 0  # blocks that it found, of those that were asked for since it began
        # When it began, if that was later than the others; ``before``: what was counted by then.
        self.since: float | None = None
        self.before = NOTHING
        self._held = RankedShadow(beside.blocks, uses)
        self._alone = RankedShadow(beside.blocks, uses)
        if self._policy_ranks:
            self._alone.leave()

    @property
    def _policy_ranks(self) -> bool:
        return self.selector is None or self.selector.trusted

    @property
    def capacity(self) -> float:
        return self.beside.capacity

    @property
    def has_tiers(self) -> bool:
        return self.beside.has_tiers

    def finds(self, there: list[int], by_lru: int, walked: int) -> int:
        """How many blocks of a request it holds, from the first on without a gap."""
        found = there[self._held.number]
        if self.selector is not None:
            by_policy = found if self.selector.trusted else there[self._alone.number]
            self.selector.note(by_policy - by_lru, walked)
        return found

    def start(self, rows: Rows, keys: Keys) -> None:
        """Hold these blocks from now on, the last used first, whatever the pools beside it hold."""
        self._held.restart(rows, keys)
        if not self._policy_ranks:
            self._alone.restart(rows, keys)

    def leave(self) -> None:
        self._held.leave()
        self._alone.leave()

    def rank(self, view: View) -> None:
        """Rank by whichever of policy and LRU found more, and update the policy's ranking."""
        keys = view.blocks.keys
        if self.selector is not None and self.selector.is_due_for_change():
            self.selector.change_hands()
            if self.selector.trusted:
                self._alone.leave()
            else:
                self._held.use_up()
                rows = self._held.rows(keys)
                self._alone.restart(rows, keys[rows])
        ranked = self._held if self._policy_ranks else self._alone
        rows = ranked.rows(keys)
        ranked.adopt(rows, self._scores(view, Selection(view.blocks, rows)))


def size_of(pool: LruPool | PolicyPool) -> int:
    return (pool if isinstance(pool, LruPool) else pool.beside).blocks


def lru_pool(blocks: int, capacity: float) -> LruPool:
    return LruPool(_name("lru", capacity), capacity, round(blocks * capacity))


def policy_pools(
    pools: Sequence[LruPool], policies: Sequence[Policy], guard: Guarding, uses: core.RankedPools
) -> list[PolicyPool]:
    """Return pools of every size for the live policy, of the live size for the others."""
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

    def scores(view: View, picked: Selection) -> Scores:
        return whole_scores(view, policy, picked)

    return PolicyPool(name, policy.name, scores, beside, guard(beside.blocks), uses)


def _name(policy: str, capacity: float) -> str:
    return policy if capacity == 1.0 else f"{policy} ×{capacity:g}"
