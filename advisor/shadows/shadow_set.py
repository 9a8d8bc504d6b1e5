"""One engine's shadows: what each would have found, request by request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ...graph.logs.heard import Heard
from ...graph.logs.step_sums import StepSums
from ...graph.ranking.policy import Policy
from ...graph.ranking.scoring import whole_scores
from ...graph.ranking.view import View
from ...graph.tables.blocks import Selection
from ..policies.shadow import LruShadow, RankedShadow
from .ceiling import Asked, RequestWindow
from .session_sample import SessionSample

CAPACITIES: Final = (1.0, 0.75, 1.25, 2.0)
"""Of the live pool's: as it is, a quarter less and more, and twice."""

STEP_S: Final = 10.0  # chosen
_STEPS: Final = 360  # of these: an hour; chosen
_COUNTED: Final = ("tokens", "asked", "ours", "all_asked", "all_ours")


@dataclass(slots=True)
class ShadowPool:
    """One simulated pool.

    Attributes:
        policy: Ranks its blocks; None: LRU, which needs no rankings.
        capacity: Its size, as a factor of the live pool's.
        has_tiers: Whether copies in colder tiers count: as so many blocks more.
    """

    name: str
    policy: Policy | None
    capacity: float
    pool: LruShadow | RankedShadow
    found: int = 0
    has_tiers: bool = False


class ShadowSet:
    """All shadows of one engine.

    Args:
        blocks: The live pool's size.
        policies: Those that rank shadows, the live one first.
        copies: That fit into the engine's colder tiers.

    Attributes:
        asked, ours: Blocks that sessions of the sample asked for, and what the live pool found.
        all_asked, all_ours: The same of all sessions.
    """

    def __init__(self, blocks: int, policies: Sequence[Policy], copies: int = 0) -> None:
        self.blocks, self.copies = blocks, copies
        self.sample = SessionSample()
        self.pools = [*_of_lru(blocks), *_of_policies(blocks, policies)]
        if copies:
            self.pools += _with_tiers(blocks, copies, policies[:1])
        self.window = RequestWindow()
        self.asked = self.ours = self.all_asked = self.all_ours = 0
        self.block_size = 0  # tokens; 0 before any request
        self.belady: tuple[int, int] = 0, 0  # asked, found
        names = [pool.name for pool in self.pools]
        self.steps = StepSums((*_COUNTED, *names), STEP_S, _STEPS)

    def hear(self, heard: Heard) -> None:
        """Follow a request that began or ended."""
        ours = min(heard.found + heard.loaded, heard.reach)
        if heard.found >= 0:
            self._count_all(heard, ours)
        if not self.sample.has(heard.session):
            return
        self.sample.walked(heard.session, heard.rows, heard.keys)
        counts = [self._ask(pool, heard) for pool in self.pools]
        if heard.found >= 0:
            self.asked, self.ours = self.asked + len(heard.rows), self.ours + ours
            self.steps.add([0, len(heard.rows), ours, 0, 0, *counts], heard.at)
            self.window.add(heard.keys, heard.reach, ours)
        else:
            self.window.answered(heard.keys[heard.reach :])
        for pool in self.pools:
            pool.pool.use(heard.rows, heard.keys)

    def _count_all(self, heard: Heard, ours: int) -> None:
        """Count a request whether its session is followed or not: the live pool's share of all is
        known, and need not be guessed from the sample."""
        blocks, none = len(heard.rows), [0] * len(self.pools)
        self.block_size = heard.size
        self.all_asked, self.all_ours = self.all_asked + blocks, self.all_ours + ours
        self.steps.add([heard.tokens, 0, 0, blocks, ours, *none], heard.at)

    def _ask(self, shadow: ShadowPool, heard: Heard) -> int:
        if heard.found < 0:
            return 0
        found = shadow.pool.found(heard.rows[: heard.reach], heard.keys[: heard.reach])
        shadow.found += found
        return found

    def rate(self, found: int) -> float | None:
        """The share of all sessions' blocks that a shadow would have found.

        Args:
            found: Of those that the sample asked for.
        """
        return for_all(found, self.ours, self.asked, self.all_ours, self.all_asked)

    def remembered(self) -> tuple[list[Asked], int]:
        """The last requests of the sample, and how large a pool is for it."""
        return self.window.taken(), self.pools[0].pool.capacity

    def halve(self) -> bool:
        """Follow half as many sessions from now on; False if there is nothing left to halve."""
        if not self.sample.halve():
            return False
        self.window = RequestWindow()  # it remembers those that are followed no longer
        return True

    def hold_what_is_there(self, view: View) -> None:
        """Fill all shadows with what the live pool holds, the last used on top."""
        blocks = view.blocks
        resident = blocks.pick(blocks.resident(view.engine))
        newest_first = resident.rows[np.argsort(-resident.last_used(), kind="stable")]
        for each in self.pools:
            kept = newest_first[: each.pool.capacity]
            each.pool.use(kept, blocks.keys[kept])
        self.sample.seeded(newest_first, blocks.keys[newest_first])

    def rank(self, view: View) -> None:
        """Rank what each shadow holds again, and resize each to what the sample now asks for."""
        blocks = view.blocks
        resident = np.flatnonzero(blocks.resident(view.engine)).astype(np.int32)
        part = self.sample.part_of(resident, blocks.keys[resident])
        for each in self.pools:
            each.pool.capacity = max(1, round(self.blocks * each.capacity * part))
            if each.policy is not None and isinstance(each.pool, RankedShadow):
                rows = each.pool.rows(blocks.keys)
                scores = whole_scores(view, each.policy, Selection(blocks, rows))
                each.pool.adopt(rows[np.argsort(-scores, kind="stable")])


def for_all(found: int, ours: int, asked: int, all_ours: int, all_asked: int) -> float | None:
    """The share of all blocks that a shadow would have found; None before any.

    A sample's sessions find more or less than all do, whoever keeps the pool. So only what a shadow
    found beside the live pool is taken from the sample, and what the live pool found from all: a
    difference estimator (W. G. Cochran, Sampling Techniques, 7.3).
    """
    if not asked or not all_asked:
        return None
    return min(1.0, max(0.0, all_ours / all_asked + (found - ours) / asked))


def _of_lru(blocks: int) -> list[ShadowPool]:
    return [
        ShadowPool(_name("lru", capacity), None, capacity, LruShadow(round(blocks * capacity)))
        for capacity in CAPACITIES
    ]


def _of_policies(blocks: int, policies: Sequence[Policy]) -> list[ShadowPool]:
    """The live policy at every size, the others at the live pool's."""
    found = []
    for place, policy in enumerate(policies):
        for capacity in CAPACITIES if place == 0 else CAPACITIES[:1]:
            pool = RankedShadow(round(blocks * capacity))
            found.append(ShadowPool(_name(policy.name, capacity), policy, capacity, pool))
    return found


def _with_tiers(blocks: int, copies: int, policies: Sequence[Policy]) -> list[ShadowPool]:
    """Stock's order and the live policy, with room for copies of what leaves the pool.

    What leaves the pool and is copied is found as if it had stayed: so pool and tiers are one pool,
    as large as both.
    """
    both = blocks + copies
    found = [ShadowPool("lru + tiers", None, both / blocks, LruShadow(both), has_tiers=True)]
    for policy in policies:
        name = f"{policy.name} + tiers"
        found.append(ShadowPool(name, policy, both / blocks, RankedShadow(both), has_tiers=True))
    return found


def _name(policy: str, capacity: float) -> str:
    return policy if capacity == 1.0 else f"{policy} ×{capacity:g}"
