"""What `kvgraph bench policies` plays: hit rates of arms on traces at capacities."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from kvgraph.advisor.policies.registry import DEFAULT, new_policy
from kvgraph.advisor.replay.arms import BY_DEFAULT, HINTS, Settings, new_orders, run_arm
from kvgraph.advisor.replay.closed import Loop
from kvgraph.advisor.replay.closed_arms import (
    ADMISSION,
    HOST,
    LPM,
    ClosedCell,
    ClosedPlan,
    ClosedRow,
    SessionPart,
    part_of,
    run_cell,
)
from kvgraph.advisor.replay.graph_order import GraphOrder, SimulatedSidecar
from kvgraph.advisor.replay.recordings import Session
from kvgraph.advisor.replay.simulator import Instance, simulate
from kvgraph.advisor.replay.trace import Ints, Trace
from kvgraph.graph.ranking.policy import Policy, ScoreProfile, Scores, Terms, View
from kvgraph.graph.tables.blocks import Selection

from ..figures import Figures
from .policies_journal import Course

_SEED: Final = 20_261_121
Draw = Callable[[int], Scores]


class Oblivious:
    """Scores blocks without looking at them."""

    def __init__(self, name: str, draw: Draw) -> None:
        self.name = name
        self._draw = draw

    def observe(self, view: View) -> None:
        """There is nothing that it could learn."""

    def scores(self, view: View, picked: Selection) -> Scores:
        """float64 ``[len(picked)]``, of no meaning."""
        return self._draw(len(picked))

    def terms(self, view: View, picked: Selection) -> Terms:
        """None: no score is made of anything."""
        return {}


class Reversed:
    """Lets go first what another policy would keep the longest."""

    def __init__(self, policy: Policy) -> None:
        self.name = f"reversed {policy.name}"
        self._policy = policy

    def observe(self, view: View) -> None:
        """Learn what the other policy learns."""
        self._policy.observe(view)

    def scores(self, view: View, picked: Selection) -> Scores:
        """float64 ``[len(picked)]``, the other's with the wrong sign."""
        return -self._policy.scores(view, picked)

    def terms(self, view: View, picked: Selection) -> Terms:
        """The other's terms with the wrong sign."""
        terms = self._policy.terms(view, picked)
        return {name: -value for name, value in terms.items()}


def _random() -> Policy:
    return Oblivious("random", np.random.default_rng(_SEED).random)


NONSENSE: Final[dict[str, Callable[[], Policy]]] = {
    "constant": lambda: Oblivious("constant", np.zeros),
    "random": _random,
    "nan": lambda: Oblivious("nan", lambda blocks: np.full(blocks, np.nan)),
    "reversed": lambda: Reversed(new_policy(DEFAULT)),
}  # fresh policies by name


NONSENSE_ARM: Final = "nonsense:"
HINTED: Final = BY_DEFAULT + HINTS
PRICE_ARM: Final = "price of protection"
BARE_ARM: Final = HINTED + " without protection"
OTHERS_ARM: Final = HINTED + ", all but the first tenant"
QUICK_ARMS: Final = ("lru", "belady")  # arms that take next to no time
_QUICK: Final = 0.05  # of another arm's time; chosen


class Cell(NamedTuple):
    """One simulation."""

    trace: str
    arm: str
    capacity: int


class Rates:
    """Prompt blocks matched by prefix / all prompt blocks, by cell."""

    def __init__(self, rates: Mapping[Cell, float]) -> None:
        self.rates = dict(rates)

    def points(self, cell: Cell) -> float:
        """What an arm finds more than LRU, in percent of the prompt."""
        return 100 * (self.rates[cell] - self.rates[cell._replace(arm="lru")])

    def gap(self, trace: str, arm: str, capacities: Sequence[int]) -> float:
        """The share of the way from LRU to Belady that an arm goes, mean over capacities."""
        shares = []
        for capacity in capacities:
            cell = Cell(trace, arm, capacity)
            lru, bound = (self.rates[cell._replace(arm=name)] for name in ("lru", "belady"))
            shares.append((self.rates[cell] - lru) / max(bound - lru, 1e-9))
        return sum(shares) / len(shares)


def play(traces: Mapping[str, Trace], cells: Sequence[Cell], course: Course) -> Rates:
    """Run every cell once, and LRU and Belady wherever something else is run: those first, so that
    whoever interrupts knows how far each other cell went."""
    bounds = {cell._replace(arm=arm) for cell in cells for arm in QUICK_ARMS}

    def effort(cell: Cell) -> float:
        return len(traces[cell.trace]) * (_QUICK if cell.arm in QUICK_ARMS else 1.0)

    def turn(cell: Cell) -> tuple[bool, float, Cell]:
        return cell.arm not in QUICK_ARMS, -effort(cell), cell

    every = sorted({*cells, *bounds}, key=turn)
    return Rates(course.play("hit rates", hit_rate, traces, every, effort))


def hit_rate(traces: Mapping[str, Trace], cell: Cell) -> float:
    """Prompt blocks matched by prefix / all prompt blocks."""
    trace, settings = traces[cell.trace], Settings()
    if cell.arm == PRICE_ARM:
        return _price(trace, cell.capacity)
    if cell.arm == BARE_ARM:
        settings = Settings(profile=ScoreProfile(protected_layers=frozenset()))
        return _found(run_arm(HINTED, trace, cell.capacity, settings), trace)
    if cell.arm == OTHERS_ARM:
        assert trace.said is not None
        others = trace.said.tenant != 0
        hits = run_arm(HINTED, trace, cell.capacity, settings)
        return float(hits[others].sum() / max(1, trace.prompts[others].sum()))
    if cell.arm.startswith(NONSENSE_ARM):
        policy = NONSENSE[cell.arm.removeprefix(NONSENSE_ARM)]()
        order = GraphOrder(SimulatedSidecar(trace, policy), settings.planning)
        hits = simulate(trace, [Instance(cell.capacity, order)]).hits
    else:
        hits = run_arm(cell.arm, trace, cell.capacity, settings)
    return _found(hits, trace)


def _found(hits: Ints, trace: Trace) -> float:
    return float(hits.sum() / max(1, trace.prompt_blocks))


def _price(trace: Trace, capacity: int) -> float:
    """What a sidecar says at the end that protection cost, as a share of the prompt."""
    (order,) = new_orders(HINTED, trace, Settings(), 1)
    simulate(trace, [Instance(capacity, order)])
    assert isinstance(order, GraphOrder)
    budget = order.sidecar.graph.tables.budgets.get(0)
    return 0.0 if budget is None else (budget.points_ever or 0.0) / 100.0


ADMITTED: Final = BY_DEFAULT + ADMISSION
"""Nothing is said by callers: sessions are inferred, and nobody knows which are over."""
TIERED: Final = BY_DEFAULT + HOST + ADMISSION
PLAIN_TIER: Final = "lru" + HOST
"""Least recently used in pool and host memory, which has room for as much as the pool."""
LOST: Final = 0.25  # of the prompt, computed: beyond it an engine is past its cliff
UNDER: Final = 0.75
OVER: Final = 1.5  # of the agents at LRU's cliff
_STOCK: Final = 0.15  # of an advised arm's time; chosen
_FURTHER: Final = (1.2, 1.3, 1.4, 1.6)  # of the agents at LRU's cliff: where is the other's?


Known = Mapping[tuple[str, int, int], ClosedRow]  # rows by arm, capacity and agents


@dataclass(frozen=True, slots=True)
class LoopScale:
    """How much is played.

    Attributes:
        ladders: Capacity in blocks → agents among whom LRU's cliff is.
        tiered: The same, with plain host memory of one pool.
        hours, warm_hours: Played, and of these not counted.
    """

    ladders: Mapping[int, Sequence[int]]
    tiered: Mapping[int, Sequence[int]]
    hours: float
    warm_hours: float

    def plan(self, sessions: Sequence[Session]) -> ClosedPlan:
        """On the sessions of even rank: on those of odd rank the controller was shaped."""
        loop = Loop(1, 3600 * self.hours, warm_s=3600 * self.warm_hours)
        return ClosedPlan(part_of(sessions, SessionPart.EVEN), loop)


FULL: Final = LoopScale(
    {2000: (10, 12, 14, 16, 18, 20), 4000: (20, 24, 28, 32, 36, 40)},
    {2000: (20, 24, 28, 32, 36)},
    2.0, 0.75,
)  # fmt: skip
QUICK: Final = LoopScale({1000: (4, 6, 8, 10)}, {1000: (10, 14, 18)}, 1.0, 0.6)


def add_loop(
    figures: Figures,
    sessions: Sequence[Session],
    scale: LoopScale,
    course: Course,
) -> list[dict[str, Any]]:
    """Measure, add the figures, and give every row."""
    plan, stocks = scale.plan(sessions), {"lru": scale.ladders, PLAIN_TIER: scale.tiered}
    ladder = [
        ClosedCell(stock, capacity, users)
        for stock, ladders in stocks.items()
        for capacity, rungs in ladders.items()
        for users in rungs
    ]
    rows = _played(course, plan, ladder)
    cliffs, tiered = (
        {capacity: cliff(rows, stock, capacity) for capacity in ladders}
        for stock, ladders in stocks.items()
    )
    cells = [cell for each in cliffs.items() for cell in _beyond(*each)]
    cells += [cell for each in tiered.items() for cell in _beyond_tiers(*each)]
    new = [cell for cell in dict.fromkeys(cells) if cell not in ladder]
    rows += _played(course, plan, new)
    known = {(row.arm, row.capacity, row.users): row for row in rows}
    _add(figures, known, cliffs)
    _add_tiers(figures, known, tiered)
    ours = [row for row in rows if row.arm in (ADMITTED, TIERED)]
    figures.add("lab_longest_hold_s", max(row.longest_hold for row in ours), "s", "≤ 300")
    figures.add("lab_starved", sum(row.starved for row in ours), "requests", "0")
    return [row.as_dict() for row in rows]


def found_in(plan: ClosedPlan, cell: ClosedCell) -> dict[str, Any]:
    """What a cell found, as a journal keeps it."""
    return asdict(run_cell(plan, cell))


def _played(course: Course, plan: ClosedPlan, cells: Sequence[ClosedCell]) -> list[ClosedRow]:
    found = course.play("closed loops", found_in, plan, cells, _effort)
    return [ClosedRow(**found[cell]) for cell in cells]


def _effort(cell: ClosedCell) -> float:
    return cell.users * (1.0 if cell.arm.startswith(BY_DEFAULT) else _STOCK)


def cliff(rows: Iterable[ClosedRow], arm: str, capacity: int) -> int:
    """The most agents of whom, and of fewer, an arm computes no more than ``LOST`` again."""
    found = sorted(
        (row.users, row.computed) for row in rows if (row.arm, row.capacity) == (arm, capacity)
    )
    stands = found[0][0]
    for users, computed in found:
        if computed > LOST:
            break
        stands = users
    return stands


def _beyond(capacity: int, users: int) -> list[ClosedCell]:
    over, under = round(OVER * users), round(UNDER * users)
    cells = [ClosedCell(arm, capacity, over) for arm in ("lru", LPM, ADMITTED)]
    cells += [ClosedCell(arm, capacity, under) for arm in ("lru", ADMITTED)]
    return cells + [ClosedCell(ADMITTED, capacity, round(each * users)) for each in _FURTHER]


def _beyond_tiers(capacity: int, users: int) -> list[ClosedCell]:
    arms = (PLAIN_TIER, TIERED, ADMITTED)
    return [ClosedCell(arm, capacity, round(OVER * users)) for arm in arms]


def _add(figures: Figures, known: Known, cliffs: Mapping[int, int]) -> None:
    under = [known[ADMITTED, capacity, round(UNDER * each)] for capacity, each in cliffs.items()]
    further = [cliff(known.values(), ADMITTED, each) / users for each, users in cliffs.items()]
    over, lpm = (_ratio(known, cliffs, ADMITTED, other, OVER) for other in ("lru", LPM))
    figures.add("lab_turns_ratio_over", over, "×", "≥ 2.5")
    figures.add("lab_agents_before_cliff_ratio", min(further), "×", "≥ 1.4")
    figures.add("lab_turns_ratio_lpm", lpm, "×", "≥ 1")
    least = _ratio(known, cliffs, ADMITTED, "lru", UNDER)
    figures.add("lab_turns_ratio_under", least, "×", "≥ 0.99")
    figures.add("lab_held_under", max(row.held for row in under), "of requests", "≤ 0.01")


def _add_tiers(figures: Figures, known: Known, cliffs: Mapping[int, int]) -> None:
    """Past the cliff of plain host memory: with as much of it, and with none at all."""
    with_it = _ratio(known, cliffs, TIERED, PLAIN_TIER, OVER)
    without = _ratio(known, cliffs, ADMITTED, PLAIN_TIER, OVER)
    figures.add("lab_turns_ratio_over_host", with_it, "×", "≥ 1.5")
    figures.add("lab_turns_ratio_over_host_without", without, "×", "reported")


def _ratio(known: Known, cliffs: Mapping[int, int], arm: str, other: str, share: float) -> float:
    """Turns per hour of an arm to another's at a share of the cliffs' agents, the worst of them."""
    ratios = []
    for capacity, users in cliffs.items():
        ours, theirs = (known[name, capacity, round(share * users)] for name in (arm, other))
        ratios.append(ours.turns_per_hour / max(1.0, theirs.turns_per_hour))
    return min(ratios)
