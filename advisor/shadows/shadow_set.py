"""One engine's shadows: what each would have found, request by request."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from ...graph.logs.heard import Heard
from ...graph.logs.step_sums import StepSums
from ...graph.ranking.policy import Policy
from ...graph.ranking.view import View
from ...graph.types import Rows
from ..policies.lru_stack import LruStack
from ..policies.shadow import Uses
from ..policies.trust import Trust
from .ceiling import Beside, Ceiling, RequestWindow, Walked
from .other_weights import OtherWeights
from .session_sample import SessionSample
from .shadow_pools import (
    CAPACITIES,
    OTHERWISE,
    Counted,
    Guarding,
    LruPool,
    PolicyPool,
    for_all,
    in_sample,
    lru_pool,
    otherwise_pool,
    policy_pool,
    policy_pools,
    size_of,
)

STEP_S: Final = 10.0  # chosen
_STEPS: Final = 1440  # of these: four hours, as of the tokens of prompts
_ROUNDING: Final = 1e-6  # blocks
_COUNTED: Final = ("tokens", "asked", "ours", "sampled")


def _no_guard(blocks: int) -> Trust | None:
    return None


class ShadowSet:
    """All shadows of one engine.

    Args:
        blocks: The live pool's size.
        policies: Those that rank shadows, the live one first.
        copies: That fit into the engine's colder tiers.
        guard: Sees to it that LRU ranks where it finds more.

    Attributes:
        asked, ours: Blocks that all sessions asked for, and what the live pool found.
        sampled: Blocks that sessions of the sample asked for.
    """

    def __init__(
        self, blocks: int, policies: Sequence[Policy], copies: int = 0, guard: Guarding = _no_guard
    ) -> None:
        self.blocks, self.copies, self._guard = blocks, copies, guard
        self.sample = SessionSample()
        self.lru = [lru_pool(blocks, capacity) for capacity in CAPACITIES]
        self._uses = Uses()  # of the sample: what all policies' pools follow
        self.ranked = policy_pools(self.lru, policies, guard, self._uses)
        self.otherwise: PolicyPool | None = None
        if copies:
            both = blocks + copies
            room = LruPool("lru + tiers", both / blocks, both, has_tiers=True)
            self.lru.append(room)
            self.ranked += [
                policy_pool(room, f"{each.name} + tiers", each, guard, self._uses)
                for each in policies[:1]
            ]
        self._stack = LruStack([each.blocks for each in self.lru])
        self.window = RequestWindow()
        self.asked = self.ours = self.sampled = 0
        self.block_size = 0  # tokens; 0 before any request
        self.belady = Ceiling()
        self.beside_belady: dict[str, Beside] = {}  # what others found of the same requests
        controls = [in_sample(each.name) for each in self.lru]
        names = [each.name for each in self.pools]
        self.steps = StepSums((*_COUNTED, *controls, *names, OTHERWISE), STEP_S, _STEPS)

    @property
    def pools(self) -> list[LruPool | PolicyPool]:
        """All shadows, those of LRU first, and last that of other weights."""
        return [*self.lru, *self.of_policies]

    @property
    def of_policies(self) -> list[PolicyPool]:
        """Shadows that follow a sample of sessions."""
        return [*self.ranked, *([] if self.otherwise is None else [self.otherwise])]

    def hear(self, heard: Heard) -> None:
        """Follow a request that began or ended."""
        followed = self.sample.has(heard.session)
        if followed:
            new = slice(0 if heard.found >= 0 else heard.reach, None)  # its start told the others
            self.sample.walked(heard.session, heard.rows[new], heard.keys[new])
        if heard.found >= 0:
            self._count(heard, followed)
        else:
            self.window.answered(heard.keys[heard.reach :])
        self._stack.use(heard.rows, heard.keys)
        if followed:
            self._uses.use(heard.rows, heard.keys)

    def _count(self, heard: Heard, followed: bool) -> None:
        """Count what a request that began would have found in each pool."""
        before = self.counts()
        ours = min(heard.found + heard.loaded, heard.reach)
        blocks, sampled = len(heard.rows), len(heard.rows) if followed else 0
        self.block_size = heard.size
        self.asked, self.ours = self.asked + blocks, self.ours + ours
        self.sampled += sampled
        prompt = heard.rows[: heard.reach], heard.keys[: heard.reach]
        of_all = self._stack.found(*prompt)
        of_sample = of_all if followed else [0] * len(self.lru)
        by_lru = dict(zip((each.name for each in self.lru), of_all, strict=True))
        ranked = self.of_policies
        of_policies = [0] * len(ranked)
        if followed:
            there = self._uses.found(*prompt)
            of_policies = [
                each.pool.found(there, by_lru[each.beside.name], blocks) for each in ranked
            ]
        within = self.blocks + self.copies
        pools = zip(self.pools, (*of_all, *of_policies), strict=True)
        most = max(ours, *(hits for pool, hits in pools if size_of(pool) <= within))
        self.window.add(heard.keys, heard.reach, ours, most, before)
        for lru, found, in_it in zip(self.lru, of_all, of_sample, strict=True):
            lru.found, lru.sampled_found = lru.found + found, lru.sampled_found + in_it
        for each, found in zip(ranked, of_policies, strict=True):
            each.found += found
        counts = [heard.tokens, blocks, ours, sampled, *of_sample, *of_all, *of_policies]
        self.steps.add(counts, heard.at)

    def rate(self, pool: LruPool | PolicyPool) -> float | None:
        """The share of all sessions' blocks that a shadow would have found; None before any."""
        if isinstance(pool, LruPool):
            return pool.found / self.asked if self.asked else None
        heard = self.heard_by(pool)
        return for_all(pool.found, heard.control, heard.sampled, heard.known, heard.asked)

    def asked_of(self, pool: LruPool | PolicyPool) -> int:
        """Of how many blocks a shadow's ``found`` is."""
        return self.asked if isinstance(pool, LruPool) else self.heard_by(pool).sampled

    def heard_by(self, pool: PolicyPool) -> Counted:
        """What was counted since a shadow began."""
        return self._counted(pool.beside).since(pool.before)

    def _counted(self, lru: LruPool) -> Counted:
        return Counted(self.asked, self.ours, self.sampled, lru.found, lru.sampled_found)

    def counts(self) -> array[int]:
        """What was counted so far: of all, of pools under LRU, and of those that policies rank."""
        of_lru = (count for each in self.lru for count in (each.found, each.sampled_found))
        of_policies = (each.found for each in self.ranked)
        return array("q", (self.asked, self.ours, self.sampled, *of_lru, *of_policies))

    def beside(self, window: Sequence[Walked]) -> dict[str, Beside]:
        """What each shadow that has followed all of these last requests found of them, by name."""
        first = next((each.counts for each in window if each.counts is not None), None)
        if first is None:
            return {}
        since = [now - before for now, before in zip(self.counts(), first, strict=True)]
        asked, _, sampled = since[:3]
        of_lru, of_policies = since[3 : 3 + 2 * len(self.lru)], since[3 + 2 * len(self.lru) :]
        by_lru = {
            each.name: (of_lru[2 * at], of_lru[2 * at + 1]) for at, each in enumerate(self.lru)
        }
        found = {
            name: Beside(asked, known, known / asked if asked else None)
            for name, (known, _) in by_lru.items()
        }
        for pool, hits in zip(self.ranked, of_policies, strict=True):
            known, control = by_lru[pool.beside.name]
            share = for_all(hits, control, sampled, known, asked)
            found[pool.name] = Beside(sampled, hits, share)
        return found

    @property
    def is_bounded(self) -> bool:
        """Whether the ceiling is known, and of the same requests as all others: it stands above who
        has no more room. A sample is an estimate, which may say more while little was heard."""
        within = self.blocks + self.copies
        beside = (self.beside_belady.get(x.name) for x in self.pools if size_of(x) <= within)
        shares = [each.share or 0.0 for each in beside if each is not None]
        asked, hits, ours = self.belady
        most = max([ours, *(share * asked for share in shares)])
        is_above = hits >= most - _ROUNDING
        return asked > 0 and self.otherwise is None and is_above

    def remembered(self) -> tuple[list[Walked], int]:
        """The last requests, and the pool's size."""
        return self.window.taken(), self.blocks

    def halve(self) -> bool:
        """Follow half as many sessions from now on; False if there is nothing left to halve."""
        return self.sample.halve()

    def hold_what_is_there(self, view: View) -> None:
        """Fill all shadows with what the live pool holds, the last used on top."""
        newest_first, keys = _newest_first(view), view.blocks.keys
        self._stack.use(newest_first, keys[newest_first])
        self._uses.use(newest_first, keys[newest_first])
        self.sample.seeded(newest_first, keys[newest_first])

    def weigh_otherwise(self, weights: OtherWeights, view: View) -> None:
        """Follow other weights from now on, in a pool that holds what the live one does; whatever
        other weights were followed before are not any more."""
        lru = self.lru[0]
        self.weigh_alike()
        begun = self._counted(lru)
        self.otherwise = otherwise_pool(lru, weights, self._guard, self._uses, view, begun)
        held = _newest_first(view)[: lru.blocks]
        self.otherwise.pool.start(held, view.blocks.keys[held])

    def weigh_alike(self) -> None:
        """Follow no other weights any more."""
        if self.otherwise is not None:
            self.otherwise.pool.leave()
            self.otherwise = None

    def ranking(self, view: View) -> Iterator[None]:
        """Rank what each policy's shadow holds again, and resize it to what the sample now asks
        for; shadow by shadow."""
        blocks = view.blocks
        resident = np.flatnonzero(blocks.resident(view.engine)).astype(np.int32)
        part = self.sample.part_of(resident, blocks.keys[resident])
        for each in self.of_policies:
            each.pool.resize(max(1, round(self.blocks * each.capacity * part)))
            each.rank(view)
            yield


def _newest_first(view: View) -> Rows:
    """int32: the blocks of the live pool, the last used first."""
    resident = view.blocks.pick(view.blocks.resident(view.engine))
    return resident.rows[np.argsort(-resident.last_used(), kind="stable")]
