"""``Guard``: keeps every engine at least as good as LRU, by simulating the order that does not
rank. Its hits in a simulated pool are compared with those of the other order, request by request,
over some pools' worth of blocks, and where there is host memory once more in both together. Further
simulated pools measure what protecting blocks costs.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from ...graph.compiled import core
from ...graph.ranking.copies import COPIES
from ...graph.ranking.formulas import LruPolicy
from ...graph.ranking.order import whole_runs
from ...graph.ranking.policy import PolicyChoice, ScoredRuns, View
from ...graph.ranking.rules import names_anything
from ...graph.tables.blocks import UNPLACED, Selection
from ...graph.tables.tables import Tables
from ...graph.tables.walks import Walk
from ...graph.types import Keys, Tier
from .evidence import Evidence, PolicySelector, fading, least_lead
from .protection_price import ProtectionPrice, Scoring
from .shadow import RankedShadow, newest_resident

logger = logging.getLogger(__name__)

_OF_THE_GAIN: Final = 0.02
"""Share of the policy's gain over LRU that protection may cost: if the gain is small, half a point
would be a large part of it. Chosen; a tenth costs callers who name layers besides signals a
hundredth of the way from LRU to Belady.
"""
_SURE_WITH_COPIES: Final = 2.0
"""Standard deviations by which LRU must be ahead in pool and memory together. Chosen, based on
recorded and generated agents: with one, chance ends policies that find more."""
_HERE: Final = "finds more than"
_WITH_COPIES: Final = "finds more in pool and host memory together than"
_TOGETHER: Final = "finds more on all engines of its model together than"


class Guard:
    """Decides for each engine whether the policy called ``name`` may rank. If it ``yields``, LRU
    ranks where it finds more; otherwise the policy ranks from the start, and only the cost of
    protection is measured.
    """

    def __init__(self, name: str, yields: bool = True) -> None:
        self._name = name
        self.yields = yields
        self._cases: dict[int, _Case] = {}

    def trusts(self, engine: int) -> bool:
        """Return whether the policy ranks this engine's blocks; otherwise LRU does."""
        case = self._cases.get(engine)
        return not self.yields or (case is not None and case.selector.trusted)

    def policy_choices(self) -> dict[int, PolicyChoice]:
        """Return the decision for each watched engine, by residency column."""
        return {
            engine: PolicyChoice(
                case.selector.trusted, case.selector.since.ahead, case.selector.changes
            )
            for engine, case in self._cases.items()
            if self.yields
        }

    def watch(self, view: View, scores: Scoring) -> None:
        """Compare hits since the last ranking, and decide which order ranks and how much may be
        kept.
        """
        tables = view.tables
        with view.lock:
            case = self._followed(view)
        if case is None:
            return
        if not case.selector.trusted:
            with view.lock:
                rows = case.ranked.rows(tables.blocks.keys)
            case.ranked.adopt(*scores(view, Selection(tables.blocks, rows)))
        self._price(case, view, scores if case.selector.trusted else _by_lru)

    def _followed(self, view: View) -> _Case | None:
        """Return the engine's case, after every walk since the last call, and the decision which
        order ranks; None without a pool.
        """
        tables, engine = view.tables, view.engine
        capacity = tables.usable_blocks(engine)
        if capacity < 1:
            return None
        case = self._cases.get(engine)
        if tables.walks.watch(engine) or case is None or case.selector.capacity != capacity:
            selector = (
                PolicySelector(capacity, not self.yields)
                if case is None
                else case.selector.anew(capacity)
            )
            case = _Case(core.LruStack([capacity]), RankedShadow(capacity), selector)
            case.hold_what_is_there(tables, engine)
            self._cases[engine] = case
            tables.budgets.pop(engine, None)
        case.compare_copies(tables, engine)
        case.appraise(view)
        case.follow(tables.walks.take(engine), view)
        if self.yields:
            self._judge(case, tables, engine)
        return case

    def _judge(self, case: _Case, tables: Tables, engine: int) -> None:
        if case.copies is not None and case.copies.favour_lru:
            if case.selector.trusted:
                case.change_hands(tables, engine)
                self._say(tables, engine, case.selector, _WITH_COPIES)
        elif case.selector.is_due_for_change():
            case.change_hands(tables, engine)
            self._say(tables, engine, case.selector, _HERE)
        elif case.selector.may_begin(self._fleet(tables, engine)):
            case.change_hands(tables, engine)
            self._say(tables, engine, case.selector, _TOGETHER)

    def _price(self, case: _Case, view: View, scores: Scoring) -> None:
        """Decide how much may be kept: what costs little of the policy's gain; under LRU, only what
        is free.
        """
        if case.price is None:
            return
        by_policy = case.selector.trusted
        gain = max(0.0, case.selector.points_ahead) if by_policy else 0.0
        allowed = min(view.rules.protected_price_points, _OF_THE_GAIN * gain)
        changed = case.price.rank(view, scores)
        if changed:
            with view.lock:
                changed = case.price.settle(view, allowed, by_policy)
        budget = case.price.budget
        with view.lock:
            if self._cases.get(view.engine) is case:  # else the engine is gone
                view.tables.budgets[view.engine] = budget
        if changed:
            logger.info(
                "engine %s: protection and leases may keep %d blocks from now on: %g of the pool",
                view.tables.name_of(view.engine) or "?",
                int(budget.share * case.selector.capacity),
                budget.share,
            )

    def forget(self, engine: int) -> None:
        """Forget an engine that is gone, so that the next one in its column starts under LRU."""
        self._cases.pop(engine, None)

    def _fleet(self, tables: Tables, engine: int) -> Iterator[PolicySelector]:
        """Return the decisions for engines of the same model, this one among them."""
        model_of = tables.models.get
        model = model_of(engine)
        return (each.selector for other, each in self._cases.items() if model_of(other) == model)

    def _say(self, tables: Tables, engine: int, selector: PolicySelector, why: str) -> None:
        name = tables.name_of(engine) or "?"
        ruler, other = (self._name, "LRU") if selector.trusted else ("LRU", self._name)
        logger.info("engine %s: %s ranks from now on; it %s %s", name, ruler, why, other)


@dataclass(slots=True)
class _Case:
    """One engine: both shadow pools, the evidence, and the cost of protection once there is any."""

    lru: core.LruStack
    ranked: RankedShadow
    selector: PolicySelector
    price: ProtectionPrice | None = None
    copies: PoolAndCopies | None = None
    # Blocks that the engine listed, as to a sidecar that started anew: nobody knows in which order
    # they were used, so the LRU shadow may evict others than the engine does. Evidence counts once
    # it has missed as many, and holds none of them but those used since.
    unordered: int = 0

    def compare_copies(self, tables: Tables, engine: int) -> None:
        """Count what is found in host memory and on disk, too, while there is room for copies."""
        reports = tables.reports.get(engine)
        room = 0 if reports is None else reports.copy_room
        if not room:
            self.copies = None
        elif self.copies is None or self.copies.capacity != self.selector.capacity + room:
            self.copies = PoolAndCopies(self.selector.capacity + room)
            rows = newest_resident(tables, engine, Tier.HOT | COPIES)
            self.copies.lru.use(rows, tables.blocks.keys[rows])

    def appraise(self, view: View) -> None:
        """Measure the cost of protection from the first protected block on."""
        if self.price is None and names_anything(view):
            self.price = ProtectionPrice(self.selector.capacity)
            rows = newest_resident(view.tables, view.engine)
            self.price.start(rows, view.blocks.keys[rows])

    def follow(self, walks: Sequence[Walk], view: View) -> None:
        """Have the shadow pools follow requests that began or ended."""
        keys, trusted = view.blocks.keys, self.selector.trusted
        by_lru = self.lru.follow(walks, keys)
        ranked = by_lru if trusted else self.ranked.follow(walks, keys)
        for walk, lru, shadow in zip(walks, by_lru, ranked, strict=True):
            if walk.found >= 0:
                ours = walk.found if trusted else shadow
                if self.unordered > 0:
                    self.unordered -= len(walk.rows) - lru
                else:
                    self.selector.note(min(ours, walk.reach) - lru, len(walk.rows))
            if self.price is not None:
                self.price.follow(view, walk)
        if self.copies is not None:
            self.copies.follow(walks, by_lru, keys, trusted)

    def change_hands(self, tables: Tables, engine: int) -> None:
        """Let the other order rank from now on."""
        self.selector.change_hands()
        if not self.selector.trusted:
            resident = tables.blocks.holding(engine).rows
            self.ranked.restart(resident, tables.blocks.keys[resident])

    def hold_what_is_there(self, tables: Tables, engine: int) -> None:
        rows = newest_resident(tables, engine)
        keys = tables.blocks.keys[rows]
        self.lru.use(rows, keys)
        self.ranked.use(rows, keys)
        self.unordered = int((tables.blocks.depth[rows] >= UNPLACED).sum())


@dataclass(slots=True)
class PoolAndCopies:
    """A pool and what is below it as one pool under LRU, beside what the policy finds in both: what
    it gains in the pool, it may lose in the memory. Which copies an engine has depends on more than
    the order, so nothing simulates the policy here: it must have ranked to be judged.
    """

    capacity: int
    evidence: Evidence = field(default_factory=Evidence)
    lru: core.LruStack = field(init=False)
    # Not every block is copied in time, and LRU in the engine finds less than its shadow. What both
    # found beyond the pool while LRU ranked, in blocks; old ones fade.
    found: float = 0.0
    findable: float = 0.0

    def __post_init__(self) -> None:
        self.lru = core.LruStack([self.capacity])

    def follow(
        self, walks: Sequence[Walk], in_pool: Sequence[int], keys: Keys, by_policy: bool
    ) -> None:
        """Follow walks of which LRU would find ``in_pool`` blocks each without copies."""
        least = least_lead(self.capacity)
        for walk, pool, both in zip(walks, in_pool, self.lru.follow(walks, keys), strict=True):
            if walk.found < 0:
                continue
            ours, lost = min(walk.found + walk.copied, walk.reach), 0.0
            fade = fading(len(walk.rows), self.capacity)
            if by_policy:
                share = (self.found + least) / (self.findable + least)
                lost = pool + share * (both - pool) - ours
            else:
                self.found = self.found * fade + min(max(ours - pool, 0), both - pool)
                self.findable = self.findable * fade + both - pool
            self.evidence.note(-lost, fade)

    @property
    def favour_lru(self) -> bool:
        beyond_chance = _SURE_WITH_COPIES * math.sqrt(self.evidence.spread)
        return -self.evidence.ahead > max(beyond_chance, least_lead(self.capacity))


# Under LRU the engine gets no order, and so does not evict superseded or ended blocks first. Pools
# with and without protection are treated alike, and only their difference counts.
def _by_lru(view: View, picked: Selection) -> ScoredRuns:
    return whole_runs(view, LruPolicy(), picked)
