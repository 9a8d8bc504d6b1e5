"""``ProtectionPrice``: measures in hits what protection and leases cost, and bounds their share of
the pool. Once a block is protected, up to three simulated pools keep nothing, the current share,
and a larger one. The share grows only after a trial, and shrinks as soon as it costs too much.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from ...graph.compiled import core
from ...graph.ranking.policy import ScoredRuns, View
from ...graph.ranking.rules import Limit, limits_of_kept
from ...graph.tables.blocks import Selection
from ...graph.tables.protection import ProtectionBudget, first_share
from ...graph.tables.walks import Walk
from ...graph.types import MOST_SHARE, NO_ROW, Keys, Rows, layer_mask
from .evidence import Evidence, fading
from .shadow import RankedShadow, newest_first

Scoring = Callable[[View, Selection], ScoredRuns]
_Group = tuple[int, int]  # a tenant's row, and how much of a prompt is named: 0 nothing, 2 most

# All chosen, based on recorded agents.
_LEAST_SHARE: Final = 1 / 128  # below it nothing is kept
_SETTLING: Final = 2.0  # pools' worth of walked blocks until a simulated pool shows its cost
_LEAST_ASKED: Final = 6.0  # likewise, until the cost may be called low
_REST: Final = 80.0  # likewise, until a share that was too expensive is tried again
_LONGER: Final = 16.0  # at most this many times as long if it was too expensive before
_AHEAD: Final = 0.02  # share of a pool's blocks; a smaller difference is ignored
_MOST_GROUPS: Final = 32  # groups that are distinguished
_OTHERS: Final[_Group] = (NO_ROW, -1)
_RANK_EVERY_S: Final = 2.0  # or whenever a quarter of the pool was walked
_TURNED: Final = 0.25


@dataclass(slots=True)
class _Loss:
    """Hits that some requests lose to protection."""

    # blocks missed that a pool without protection would have; old ones fade
    cost: Evidence = field(default_factory=Evidence)
    asked: float = 0.0  # number of requested blocks; fades likewise

    def note(self, lost: int, walked: int, fade: float) -> None:
        self.cost.note(lost, fade)
        self.asked = self.asked * fade + walked

    def beyond(self, points: float) -> float:
        return self.cost.ahead - points / 100.0 * self.asked

    @property
    def spread(self) -> float:
        return math.sqrt(self.cost.spread)


@dataclass(slots=True)
class _Arm:
    """A simulated pool that protects a share of itself."""

    share: float
    pool: RankedShadow
    all: _Loss = field(default_factory=_Loss)  # loss of all requests together
    # loss by tenant and by how much of its prompt a request protects: one group's loss is
    # not offset by another group's gain
    groups: dict[_Group, _Loss] = field(default_factory=dict)
    settling: float = 0.0  # walked blocks until losses count

    def note(self, group: _Group, lost: int, walked: int, fade: float) -> None:
        if self.settling > 0:
            self.settling -= walked
            return
        self.all.note(lost, walked, fade)
        if group not in self.groups and len(self.groups) >= _MOST_GROUPS:
            group = _OTHERS
        self.groups.setdefault(group, _Loss())
        for each, loss in self.groups.items():
            loss.note(lost if each == group else 0, walked if each == group else 0, fade)

    def begin(self, share: float) -> None:
        self.share, self.all, self.groups = share, _Loss(), {}
        self.settling = _SETTLING * self.pool.capacity

    @property
    def points(self) -> float | None:
        return 100.0 * self.all.cost.ahead / self.all.asked if self.all.asked else None

    def is_dear(self, points: float) -> bool:
        """Tell whether all together, or any group, surely lose more than ``points``."""
        least = _AHEAD * self.pool.capacity
        losses = (self.all, *self.groups.values())
        return any(loss.beyond(points) > max(loss.spread, least) for loss in losses)

    def is_cheap(self, points: float) -> bool:
        """Tell whether all together, and every group with enough evidence, surely lose no more."""
        enough = _LEAST_ASKED * self.pool.capacity
        known = [loss for loss in self.groups.values() if loss.asked >= enough]
        losses = (self.all, *known)
        return self.all.asked >= enough and all(-it.beyond(points) >= it.spread for it in losses)


class ProtectionPrice:
    """The cost of protection on one engine."""

    def __init__(self, capacity: int) -> None:
        self._capacity, self._uses = capacity, core.RankedPools()
        self._bare = RankedShadow(capacity, self._uses)  # keeps nothing
        self._now = _Arm(first_share(capacity), RankedShadow(capacity, self._uses))
        self._more: _Arm | None = None
        self._rest = 0.0  # walked blocks until more is tried again
        self._patience = 1.0  # doubles with each time that what was kept proved too dear
        self._lost = self._asked = 0  # since the first block was named
        self._more_points: float | None = None  # of all that is named
        self._ranked_at, self._walked = -math.inf, 0  # … since then
        self._said: tuple[bool, float] | None = None  # who ranks, and the points that are allowed
        self._hard: float | None = None  # an operator's share

    def start(self, rows: Rows, keys: Keys) -> None:
        """Fill the simulated pools with these blocks, the most recently used first."""
        self._uses.use(rows, keys)

    def follow(self, view: View, walk: Walk) -> None:
        rows, keys = walk.rows, view.blocks.keys[walk.rows]
        if walk.found >= 0 and len(rows):
            there = self._uses.found(rows[: walk.reach], keys[: walk.reach])
            self._note(_group(view, rows), there, len(rows))
        self._uses.use(rows, keys)
        self._walked += len(rows)

    def _note(self, group: _Group, there: list[int], walked: int) -> None:
        bare, fade = there[self._bare.number], fading(walked, self._capacity)
        lost = bare - there[self._now.pool.number]
        self._lost, self._asked, self._rest = (
            self._lost + lost, self._asked + walked, self._rest - walked,
        )  # fmt: skip
        self._now.note(group, lost, walked, fade)
        if self._more is not None:
            self._more.note(group, bare - there[self._more.pool.number], walked, fade)

    def rank(self, view: View, scores: Scoring) -> bool:
        """Rank the simulated pools as the engine's pool, if it is time; returns whether it did."""
        turned = self._walked >= _TURNED * self._capacity
        if view.now - self._ranked_at < _RANK_EVERY_S and not turned:
            return False
        self._ranked_at, self._walked = view.now, 0
        is_hard = view.rules.protected_share is not None
        arms = [(self._bare, 0.0), (self._now.pool, None if is_hard else self._now.share)]
        if self._more is not None:
            arms.append((self._more.pool, self._more.share))
        for pool, share in arms:
            with view.lock:
                rows = pool.rows(view.blocks.keys)
            kept = replace(view, kept_share=share)
            pool.adopt(*scores(kept, Selection(view.blocks, rows)))
        return True

    def settle(self, view: View, allowed: float, by_policy: bool) -> bool:
        """Decide how much may be kept from now on, at a cost of up to ``allowed`` percentage
        points; returns whether that changed. ``by_policy``: the policy ranks, not LRU.
        """
        hard, said = view.rules.protected_share, (by_policy, view.rules.protected_price_points)
        # LRU and the policy changed places, or the configuration changed.
        if said != self._said or hard != self._hard:
            share = self._now.share if self._hard is None else first_share(self._capacity)
            self._now.begin(share if hard is None else hard)
            self._try_no_more()
            self._said, self._hard, self._more_points = said, hard, None
            self._rest, self._patience = 0.0, 1.0
        if hard is not None:
            return False
        if self._now.share and self._now.is_dear(allowed):
            self._now.begin(_less(self._now.share))
            self._rest_from_trying()
            self._patience = min(2 * self._patience, _LONGER)
            return True
        return self._try_more(view, allowed)

    def _try_more(self, view: View, allowed: float) -> bool:
        """Try a larger share while a protected block is not kept."""
        more = self._more
        if more is None:
            if self._rest <= 0 and self._now.share < MOST_SHARE:
                if self._would_keep_more(view, MOST_SHARE):
                    self._begin_to_try(view, MOST_SHARE)
                else:
                    self._rest = self._capacity  # look again after a pool's worth of prompts
            return False
        if more.share == MOST_SHARE and more.points is not None:
            self._more_points = more.points
        if more.is_cheap(allowed):
            share = more.share
            self._try_no_more()
            if not self._would_keep_more(view, share):
                return False  # what was named has left: nothing was tried
            self._now.begin(share)
            self._more_points, self._patience = None, max(1.0, self._patience / 2)
            return True
        if more.is_dear(allowed):
            share = _less(more.share)
            self._try_no_more()
            if share > self._now.share:
                self._begin_to_try(view, share)
            else:
                self._rest_from_trying()
        return False

    def _would_keep_more(self, view: View, share: float) -> bool:
        """Tell whether a share keeps any block of the pool that the present one does not."""
        resident = view.blocks.holding(view.engine)
        now, then = (
            limits_of_kept(replace(view, kept_share=each), resident)
            for each in (self._now.share, share)
        )
        return bool(((now != Limit.NONE) & (then == Limit.NONE)).any())

    def _begin_to_try(self, view: View, share: float) -> None:
        arm = _Arm(share, RankedShadow(self._capacity, self._uses))
        rows = newest_first(self._uses, self._now.pool.rows(view.blocks.keys))
        arm.pool.restart(rows, view.blocks.keys[rows])
        arm.begin(share)
        self._more = arm

    def _try_no_more(self) -> None:
        if self._more is not None:
            self._more.pool.leave()
            self._more = None

    def _rest_from_trying(self) -> None:
        self._try_no_more()
        self._rest = _REST * self._patience * self._capacity

    @property
    def budget(self) -> ProtectionBudget:
        """Return the share that may be kept, and what is known of its cost."""
        ever = 100.0 * self._lost / self._asked if self._asked else None
        return ProtectionBudget(self._now.share, self._now.points, ever, self._more_points)


def _group(view: View, rows: Rows) -> _Group:
    """Return the group that a request's losses count for: its last block is its own session's."""
    blocks, session = view.blocks, int(view.blocks.session[rows[-1]])
    tenant = NO_ROW if session == NO_ROW else int(view.sessions.tenant[session])
    named = np.take(layer_mask(view.rules.protected_layers), blocks.layer[rows])
    return tenant, 0 if not named.any() else 1 + int(2 * np.count_nonzero(named) > len(rows))


def _less(share: float) -> float:
    return share / 2 if share / 2 >= _LEAST_SHARE else 0.0
