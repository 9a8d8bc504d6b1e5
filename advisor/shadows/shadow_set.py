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
_COUNTED: Final = ("tokens", "asked", "ours")


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
    """

    def __init__(self, blocks: int, policies: Sequence[Policy], copies: int = 0) -> None:
        self.blocks, self.copies = blocks, copies
        self.sample = SessionSample()
        self.pools = [*_of_lru(blocks), *_of_policies(blocks, policies)]
        if copies:
            self.pools += _with_tiers(blocks, copies, policies[:1])
        self.window = RequestWindow()
        self.asked = self.ours = 0
        self.belady: tuple[int, int] = 0, 0  # asked, found
        names = [pool.name for pool in self.pools]
        self.steps = StepSums((*_COUNTED, *names), STEP_S, _STEPS)

    def hear(self, heard: Heard) -> None:
        """Follow a request that began or ended."""
        if not self.sample.has(heard.session):
            return
        self.sample.walked(heard.session, heard.rows, heard.keys)
        counts = [self._ask(pool, heard) for pool in self.pools]
        if heard.found >= 0:
            ours = min(heard.found + heard.loaded, heard.reach)
            self.asked, self.ours = self.asked + len(heard.rows), self.ours + ours
            self.steps.add([heard.tokens, len(heard.rows), ours, *counts], heard.at)
            self.window.add(heard.keys, heard.reach, ours)
        for pool in self.pools:
            pool.pool.use(heard.rows, heard.keys)

    def _ask(self, shadow: ShadowPool, heard: Heard) -> int:
        if heard.found < 0:
            return 0
        found = shadow.pool.found(heard.rows[: heard.reach], heard.keys[: heard.reach])
        shadow.found += found
        return found

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
