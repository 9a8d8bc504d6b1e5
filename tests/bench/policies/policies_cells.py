"""What `kvgraph bench policies` plays: hit rates of arms on traces at capacities."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
from kvgraph.advisor.policies.registry import DEFAULT, new_policy
from kvgraph.advisor.replay.arms import BY_DEFAULT, HINTS, Settings, new_orders, run_arm
from kvgraph.advisor.replay.graph_order import GraphOrder, SimulatedSidecar
from kvgraph.advisor.replay.simulator import Instance, simulate
from kvgraph.advisor.replay.trace import Ints, Trace
from kvgraph.graph.ranking.policy import Policy, ScoreProfile, Scores, Terms, View
from kvgraph.graph.tables.blocks import Selection

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
        self._policy.observe(view)

    def scores(self, view: View, picked: Selection) -> Scores:
        """float64 ``[len(picked)]``, the other's with the wrong sign."""
        return -self._policy.scores(view, picked)

    def terms(self, view: View, picked: Selection) -> Terms:
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
    trace: str
    arm: str
    capacity: int


class Rates:
    """Prompt blocks matched by prefix / all prompt blocks, by cell."""

    def __init__(self, rates: Mapping[Cell, float]) -> None:
        self.rates = dict(rates)

    def points(self, cell: Cell) -> float:
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
    whoever interrupts knows how far each other cell went.
    """
    bounds = {cell._replace(arm=arm) for cell in cells for arm in QUICK_ARMS}

    def effort(cell: Cell) -> float:
        return len(traces[cell.trace]) * (_QUICK if cell.arm in QUICK_ARMS else 1.0)

    def turn(cell: Cell) -> tuple[bool, float, Cell]:
        return cell.arm not in QUICK_ARMS, -effort(cell), cell

    every = sorted({*cells, *bounds}, key=turn)
    return Rates(course.play("hit rates", hit_rate, traces, every, effort))


def hit_rate(traces: Mapping[str, Trace], cell: Cell) -> float:
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
