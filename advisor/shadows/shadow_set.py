"""One engine's shadows: what each would have found, request by request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ...graph.logs.heard import Heard
from ...graph.logs.step_sums import StepSums
from ...graph.ranking.policy import Policy
from ...graph.ranking.scoring import whole_scores
from ...graph.ranking.view import View
from ...graph.tables.blocks import Selection
from ..policies.lru_stack import LruStack
from ..policies.shadow import RankedShadow
from .ceiling import RequestWindow, Walked
from .session_sample import SessionSample

CAPACITIES: Final = (1.0, 0.75, 1.25, 2.0)
"""Of the live pool's: as it is, a quarter less and more, and twice."""

STEP_S: Final = 10.0  # chosen
_STEPS: Final = 1440  # of these: four hours, as of the tokens of prompts
_COUNTED: Final = ("tokens", "asked", "ours", "sampled")


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
    """A simulated pool that a policy ranks, which follows a sample of sessions.

    Attributes:
        beside: LRU in a pool as large, by which its sample stands for all.
        found: Blocks that it found, of those that the sample asked for.
    """

    name: str
    policy: Policy
    beside: LruPool
    pool: RankedShadow
    found: int = 0

    @property
    def capacity(self) -> float:
        return self.beside.capacity

    @property
    def has_tiers(self) -> bool:
        return self.beside.has_tiers

    @property
    def policy_name(self) -> str:
        return self.policy.name


class ShadowSet:
    """All shadows of one engine.

    Args:
        blocks: The live pool's size.
        policies: Those that rank shadows, the live one first.
        copies: That fit into the engine's colder tiers.

    Attributes:
        asked, ours: Blocks that all sessions asked for, and what the live pool found.
        sampled: Blocks that sessions of the sample asked for.
    """

    def __init__(self, blocks: int, policies: Sequence[Policy], copies: int = 0) -> None:
        self.blocks, self.copies = blocks, copies
        self.sample = SessionSample()
        self.lru = [_lru(blocks, capacity) for capacity in CAPACITIES]
        self.ranked = _of_policies(self.lru, policies)
        if copies:
            both = blocks + copies
            room = LruPool("lru + tiers", both / blocks, both, has_tiers=True)
            self.lru.append(room)
            self.ranked += [_beside(room, f"{each.name} + tiers", each) for each in policies[:1]]
        self._stack = LruStack([each.blocks for each in self.lru])
        self.window = RequestWindow()
        self.asked = self.ours = self.sampled = 0
        self.block_size = 0  # tokens; 0 before any request
        self.belady: tuple[int, int] = 0, 0  # asked, found
        names = [each.name for each in self.pools]
        controls = [in_sample(each.name) for each in self.lru]
        self.steps = StepSums((*_COUNTED, *names, *controls), STEP_S, _STEPS)

    @property
    def pools(self) -> list[LruPool | PolicyPool]:
        """All shadows, those of LRU first."""
        return [*self.lru, *self.ranked]

    def hear(self, heard: Heard) -> None:
        """Follow a request that began or ended."""
        followed = self.sample.has(heard.session)
        if followed:
            self.sample.walked(heard.session, heard.rows, heard.keys)
        if heard.found >= 0:
            self._count(heard, followed)
        else:
            self.window.answered(heard.keys[heard.reach :])
        self._stack.use(heard.rows, heard.keys)
        for ranked in self.ranked if followed else ():
            ranked.pool.use(heard.rows, heard.keys)

    def _count(self, heard: Heard, followed: bool) -> None:
        """Count what a request that began would have found in each pool."""
        ours = min(heard.found + heard.loaded, heard.reach)
        blocks, sampled = len(heard.rows), len(heard.rows) if followed else 0
        self.block_size = heard.size
        self.asked, self.ours = self.asked + blocks, self.ours + ours
        self.sampled += sampled
        self.window.add(heard.keys, heard.reach, ours)
        prompt = heard.rows[: heard.reach], heard.keys[: heard.reach]
        of_all = self._stack.found(*prompt)
        of_sample = of_all if followed else [0] * len(self.lru)
        of_policies = [each.pool.found(*prompt) if followed else 0 for each in self.ranked]
        for lru, found, in_it in zip(self.lru, of_all, of_sample, strict=True):
            lru.found, lru.sampled_found = lru.found + found, lru.sampled_found + in_it
        for ranked, found in zip(self.ranked, of_policies, strict=True):
            ranked.found += found
        counts = [heard.tokens, blocks, ours, sampled, *of_all, *of_policies, *of_sample]
        self.steps.add(counts, heard.at)

    def rate(self, pool: LruPool | PolicyPool) -> float | None:
        """The share of all sessions' blocks that a shadow would have found; None before any."""
        if isinstance(pool, LruPool):
            return pool.found / self.asked if self.asked else None
        lru = pool.beside
        return for_all(pool.found, lru.sampled_found, self.sampled, lru.found, self.asked)

    def asked_of(self, pool: LruPool | PolicyPool) -> int:
        """Of how many blocks a shadow's ``found`` is."""
        return self.asked if isinstance(pool, LruPool) else self.sampled

    def remembered(self) -> tuple[list[Walked], int]:
        """The last requests, and the pool's size."""
        return self.window.taken(), self.blocks

    def halve(self) -> bool:
        """Follow half as many sessions from now on; False if there is nothing left to halve."""
        return self.sample.halve()

    def hold_what_is_there(self, view: View) -> None:
        """Fill all shadows with what the live pool holds, the last used on top."""
        blocks = view.blocks
        resident = blocks.pick(blocks.resident(view.engine))
        newest_first = resident.rows[np.argsort(-resident.last_used(), kind="stable")]
        self._stack.use(newest_first, blocks.keys[newest_first])
        for each in self.ranked:
            kept = newest_first[: each.pool.capacity]
            each.pool.use(kept, blocks.keys[kept])
        self.sample.seeded(newest_first, blocks.keys[newest_first])

    def ranking(self, view: View) -> Iterator[None]:
        """Rank what each policy's shadow holds again, and resize it to what the sample now asks
        for; shadow by shadow."""
        blocks = view.blocks
        resident = np.flatnonzero(blocks.resident(view.engine)).astype(np.int32)
        part = self.sample.part_of(resident, blocks.keys[resident])
        for each in self.ranked:
            each.pool.capacity = max(1, round(self.blocks * each.capacity * part))
            rows = each.pool.rows(blocks.keys)
            each.pool.adopt(rows, whole_scores(view, each.policy, Selection(blocks, rows)))
            yield


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


def in_sample(name: str) -> str:
    """Under which name steps count what an LRU pool found of the sample."""
    return f"{name} in the sample"


def _lru(blocks: int, capacity: float) -> LruPool:
    return LruPool(_name("lru", capacity), capacity, round(blocks * capacity))


def _of_policies(pools: Sequence[LruPool], policies: Sequence[Policy]) -> list[PolicyPool]:
    """The live policy at every size, the others at the live pool's."""
    return [
        _beside(pool, _name(policy.name, pool.capacity), policy)
        for place, policy in enumerate(policies)
        for pool in (pools if place == 0 else pools[:1])
    ]


def _beside(pool: LruPool, name: str, policy: Policy) -> PolicyPool:
    """A policy's pool, as large as one of LRU.

    What leaves a pool and is copied is found as if it had stayed: so pool and tiers are one pool,
    as large as both.
    """
    return PolicyPool(name, policy, pool, RankedShadow(pool.blocks))


def _name(policy: str, capacity: float) -> str:
    return policy if capacity == 1.0 else f"{policy} ×{capacity:g}"
