"""``ProtectionPrice``: what it costs to keep blocks whatever scores say, and how much of a pool may
be kept for a given price.

Protection never saves an answer, since running requests hold their blocks: it saves computing, and
takes room from what would be found otherwise. So three simulated pools follow an engine's requests
while anything is named to be kept: one keeps nothing, one keeps what the engine does, and one tries
what more would cost. What is kept grows only after that was tried, and shrinks once it costs more
than allowed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from ...graph.ranking.policy import Scores
from ...graph.ranking.protection import Limit
from ...graph.ranking.rules import limits_of_kept
from ...graph.ranking.view import View
from ...graph.tables.blocks import Selection
from ...graph.tables.engine_words import ProtectionBudget, first_share
from ...graph.tables.walks import Walk
from ...graph.types import MOST_SHARE, NO_ROW, Keys, Rows, layer_mask
from .shadow import Found, RankedShadow, Uses
from .trust import Evidence, fading

Scoring = Callable[[View, Selection], Scores]
_Group = tuple[int, int]  # a tenant's row, and how much of a prompt is named: 0 nothing, 2 most

# All chosen, with recorded agents in sight.
_LEAST_SHARE: Final = 1 / 128  # below it nothing is kept
_SETTLING: Final = 2.0  # pools' worth of walked blocks until a simulated pool shows what it costs
_LEAST_ASKED: Final = 6.0  # … and from then on until it may be called cheap
_REST: Final = 80.0  # … after which what was too dear is tried again
_LONGER: Final = 16.0  # … and at most so many times as long where it proved too dear before
_AHEAD: Final = 0.02  # of a pool's blocks: a smaller difference is none
_MOST_GROUPS: Final = 32  # that are told apart
_OTHERS: Final[_Group] = (NO_ROW, -1)
_RANK_EVERY_S: Final = 2.0  # and whenever a quarter of the pool was walked
_TURNED: Final = 0.25


@dataclass(slots=True)
class _Loss:
    """What some requests lose by what is kept.

    Attributes:
        cost: Blocks that were not found, and would be in a pool that keeps nothing; old ones fade.
        asked: Of how many; fading alike.
    """

    cost: Evidence = field(default_factory=Evidence)
    asked: float = 0.0

    def note(self, lost: int, walked: int, fade: float) -> None:
        self.cost.note(lost, fade)
        self.asked = self.asked * fade + walked

    def beyond(self, points: float) -> float:
        """Blocks lost beyond so many points."""
        return self.cost.ahead - points / 100.0 * self.asked

    @property
    def spread(self) -> float:
        return math.sqrt(self.cost.spread)


@dataclass(slots=True)
class _Arm:
    """A simulated pool that keeps a share of itself.

    Attributes:
        all: What all requests lose together.
        groups: What each tenant's requests lose, those apart that name nothing, some or most of
            their prompts: what one group loses is not made good by what another gains.
        settling: Walked blocks until losses count.
    """

    share: float
    pool: RankedShadow
    all: _Loss = field(default_factory=_Loss)
    groups: dict[_Group, _Loss] = field(default_factory=dict)
    settling: float = 0.0

    def note(self, group: _Group, lost: int, walked: int, fade: float) -> None:
        """Note a request of ``walked`` blocks for which it lost so many."""
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
        """Keep another share from now on."""
        self.share, self.all, self.groups = share, _Loss(), {}
        self.settling = _SETTLING * self.pool.capacity

    @property
    def points(self) -> float | None:
        """What it costs; None: nobody knows yet."""
        return 100.0 * self.all.cost.ahead / self.all.asked if self.all.asked else None

    def is_dear(self, points: float) -> bool:
        """Whether all together, or any group, surely lose more than so many points."""
        least = _AHEAD * self.pool.capacity
        losses = (self.all, *self.groups.values())
        return any(loss.beyond(points) > max(loss.spread, least) for loss in losses)

    def is_cheap(self, points: float) -> bool:
        """Whether all together, and every group of which enough is known, surely lose no more."""
        enough = _LEAST_ASKED * self.pool.capacity
        known = [loss for loss in self.groups.values() if loss.asked >= enough]
        losses = (self.all, *known)
        return self.all.asked >= enough and all(-it.beyond(points) >= it.spread for it in losses)


class ProtectionPrice:
    """One engine's price of protection; see the module.

    Args:
        capacity: Blocks of the pool.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity, self._uses = capacity, Uses()
        self._bare = RankedShadow(capacity, self._uses)  # keeps nothing
        self._now = _Arm(first_share(capacity), RankedShadow(capacity, self._uses))
        self._more: _Arm | None = None
        self._rest = 0.0  # walked blocks until more is tried again
        self._patience = 1.0  # doubles with each time that what was kept proved too dear
        self._lost = self._asked = 0  # since the first block was named
        self._more_points: float | None = None  # of all that is named
        self._ranked_at, self._walked = -math.inf, 0  # … since then
        self._allowed: float | None = None
        self._hard = False

    def start(self, rows: Rows, keys: Keys) -> None:
        """Hold these blocks, the last used first."""
        self._uses.use(rows, keys)

    def follow(self, view: View, walk: Walk) -> None:
        """Follow a request that began or ended."""
        rows, keys = walk.rows, view.blocks.keys[walk.rows]
        if walk.found >= 0 and len(rows):
            there = self._uses.found(rows[: walk.reach], keys[: walk.reach])
            self._note(_group(view, rows), there, len(rows))
        self._uses.use(rows, keys)
        self._walked += len(rows)
        self._rest -= len(rows)

    def _note(self, group: _Group, there: Found, walked: int) -> None:
        bare, fade = there.by(self._bare), fading(walked, self._capacity)
        lost = bare - there.by(self._now.pool)
        self._lost, self._asked = self._lost + lost, self._asked + walked
        self._now.note(group, lost, walked, fade)
        if self._more is not None:
            self._more.note(group, bare - there.by(self._more.pool), walked, fade)

    def rank(self, view: View, scores: Scoring) -> None:
        """Let whoever ranks the engine's pool rank the simulated ones, if it is time to."""
        keys = view.blocks.keys
        turned = self._walked >= _TURNED * self._capacity
        if view.now - self._ranked_at < _RANK_EVERY_S and not turned:
            return
        self._ranked_at, self._walked = view.now, 0
        arms = [(self._bare, 0.0), (self._now.pool, None if self._hard else self._now.share)]
        if self._more is not None:
            arms.append((self._more.pool, self._more.share))
        for pool, share in arms:
            rows = pool.rows(keys)
            pool.adopt(rows, scores(_keeping(view, share), Selection(view.blocks, rows)))

    def settle(self, view: View, allowed: float) -> bool:
        """Decide how much is kept from now on; whether that changed.

        Args:
            allowed: Points that it may cost.
        """
        self._hard = view.rules.protected_share is not None
        if allowed != self._allowed:  # another one ranks, or somebody said so
            self._allowed = allowed
            self._now.begin(self._now.share)
            self._try_no_more()
        if self._hard:
            self._now.share = view.rules.protected_share or 0.0
            self._try_no_more()
            return False
        if self._now.is_dear(allowed):
            self._now.begin(_less(self._now.share))
            self._rest_from_trying()
            self._patience = min(2 * self._patience, _LONGER)
            return True
        return self._try_more(view, allowed)

    def _try_more(self, view: View, allowed: float) -> bool:
        """Try what more would cost, while anything that is named is not kept."""
        more = self._more
        if more is None:
            if self._rest <= 0 and self._now.share < MOST_SHARE and self._some_are_left(view):
                self._begin_to_try(view, MOST_SHARE)
            return False
        if more.share == MOST_SHARE and more.points is not None:
            self._more_points = more.points
        if more.is_cheap(allowed):
            self._now.begin(more.share)
            self._try_no_more()
            self._more_points = None
            return True
        if more.is_dear(allowed):
            share = _less(more.share)
            self._try_no_more()
            if share > self._now.share:
                self._begin_to_try(view, share)
            else:
                self._rest_from_trying()
        return False

    def _some_are_left(self, view: View) -> bool:
        resident = view.blocks.pick(view.blocks.resident(view.engine))
        left = limits_of_kept(_keeping(view, self._now.share), resident) != Limit.NONE
        return bool(left.any())

    def _begin_to_try(self, view: View, share: float) -> None:
        arm = _Arm(share, RankedShadow(self._capacity, self._uses))
        rows = self._now.pool.rows(view.blocks.keys)
        rows = rows[np.argsort(-self._uses.used[rows], kind="stable")]
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
        """What is kept, and what is known of its price."""
        ever = 100.0 * self._lost / self._asked if self._asked else None
        return ProtectionBudget(self._now.share, self._now.points, ever, self._more_points)


def _group(view: View, rows: Rows) -> _Group:
    """Whose a request's losses are: its last block is its own session's."""
    blocks, session = view.blocks, int(view.blocks.session[rows[-1]])
    tenant = NO_ROW if session == NO_ROW else int(view.sessions.tenant[session])
    named = np.take(layer_mask(view.rules.protected_layers), blocks.layer[rows])
    return tenant, 0 if not named.any() else 1 + int(2 * np.count_nonzero(named) > len(rows))


def _keeping(view: View, share: float | None) -> View:
    return View(view.tables, view.rules, view.engine, view.now, share)


def _less(share: float) -> float:
    return share / 2 if share / 2 >= _LEAST_SHARE else 0.0
