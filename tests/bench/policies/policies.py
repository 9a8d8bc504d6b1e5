"""``kvgraph bench policies``: the default policy on recorded agents and on conversations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvgraph.advisor.replay.arms import BY_DEFAULT
from kvgraph.advisor.replay.fast import lru_hits
from kvgraph.advisor.replay.fleet_traffic import Signals
from kvgraph.advisor.replay.reader import load_trace
from kvgraph.advisor.replay.recorded_sessions import Session
from kvgraph.advisor.replay.trace import Trace
from rich.console import Console

from ..errors import InputError
from ..figures import Figures, keep_raw
from .policies_cells import (
    BARE_ARM,
    HINTED,
    NONSENSE,
    NONSENSE_ARM,
    OTHERS_ARM,
    PRICE_ARM,
    Cell,
    Course,
    Journal,
    Rates,
    fingerprint,
    play,
)
from .policies_cells import JOURNAL as DEFAULT
from .policies_fleets import (
    CONVERSATIONS,
    FAST,
    default_sessions,
    faster,
    fleet,
    halves,
    of_tenants,
    sessions_in,
)

STANDS: Final = (0.2, 0.95)  # where LRU is beyond, there is nothing to gain or nothing to lose


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is played; capacities are for 40 users, and grow with their number."""

    hours: float
    main_users: int
    other_users: tuple[int, ...]
    main: tuple[int, ...]
    ladder: tuple[int, ...]
    conversations: tuple[int, ...]
    conversations_ladder: tuple[int, ...]
    conversations_share: float

    def capacities(self, users: int) -> list[int]:
        """Where a fleet of as many users may be worth playing, in blocks."""
        return sorted({*self.ladder, *self.main} if users == self.main_users else
                      {rung * users // self.main_users for rung in self.ladder})  # fmt: skip


FULL: Final = Scale(
    3.0, 40, (25, 80), (1000, 2000, 4000), (500, 1000, 2000, 4000, 6000),
    (2000, 5000, 10_000), (10_000, 20_000), 1.0,
)  # fmt: skip
QUICK: Final = Scale(1.0, 25, (), (600, 1200), (600, 1200), (2000,), (10_000,), 0.25)


@dataclass
class _Plan:
    """What is to be played, and what of it each figure is made of."""

    scale: Scale
    sessions: list[Session] = field(default_factory=list)
    traces: dict[str, Trace] = field(default_factory=dict)
    cells: set[Cell] = field(default_factory=set)
    fleets: list[str] = field(default_factory=list)
    plain: set[Cell] = field(default_factory=set)  # arms that nobody tells anything
    conversations: str | None = None

    def add(self, trace: Trace, arm: str, capacities: list[int] | tuple[int, ...]) -> None:
        self.traces[trace.name] = trace
        cells = {Cell(trace.name, arm, capacity) for capacity in capacities}
        self.cells |= cells
        if arm == BY_DEFAULT:
            self.plain |= cells


def run(
    progress: bool,
    sessions: Path | None = None,
    conversations: Path | None = None,
    quick: bool = False,
    processes: int = 2,
    raw: Path | None = None,
    journal: Path | None = None,
    resume: bool = False,
) -> Figures:
    plan = _Plan(QUICK if quick else FULL)
    console = Console(stderr=True, quiet=not progress)
    with console.status("reading sessions") as status:
        _plan_fleets(plan, sessions or default_sessions(), status.update)
        _plan_conversations(plan, conversations)
    course = Course(_journal(plan, journal or DEFAULT, resume), processes, console)
    rates = play(plan.traces, sorted(plan.cells), course)
    figures = _figures(plan, rates)
    if raw is not None:
        keep_raw(raw, _raw(plan, rates, figures))
    return figures


def _journal(plan: _Plan, path: Path, resume: bool) -> Journal:
    return Journal(path, fingerprint(plan.traces, repr(plan.scale)), resume)


def _plan_fleets(plan: _Plan, directory: Path, say: Callable[[str], None]) -> None:
    scale = plan.scale
    plan.sessions = sessions_in(directory, lambda files: say(f"reading sessions: {files}"))
    say("laying sessions over users")
    for letter, half in zip("AB", halves(plan.sessions), strict=True):
        name = f"{scale.main_users} users {letter}"
        told = fleet(name, half, scale.main_users, scale.hours, Signals.ALL)
        stops = fleet(f"{name}, stops", half, scale.main_users, scale.hours, Signals.STOPS)
        plan.fleets.append(name)
        plan.add(
            told, BY_DEFAULT, standing_among(told, scale.capacities(scale.main_users), scale.main)
        )
        plan.add(told, HINTED, scale.main)
        # An engine can see why answers end, and not which session a request is of.
        plan.add(stops.unnamed(), HINTED, scale.main)
        _plan_layers(plan, letter, half, told)
        plan.add(faster(told, FAST), BY_DEFAULT, scale.main)
        for nonsense in NONSENSE if letter == "A" else ():
            plan.add(told, NONSENSE_ARM + nonsense, scale.main)
    for users in scale.other_users:
        other = fleet(f"{users} users", plan.sessions, users, scale.hours, Signals.NONE)
        plan.add(other, BY_DEFAULT, standing_among(other, scale.capacities(users)))


def _plan_layers(plan: _Plan, letter: str, half: list[Session], told: Trace) -> None:
    """Callers who say where tools and rules stand, with all signals and with none; and a tenant
    that calls everything axioms.
    """
    scale, name = plan.scale, f"{plan.scale.main_users} users {letter}"
    users, hours = scale.main_users, scale.hours
    both = fleet(f"{name}, signals and layers", half, users, hours, Signals.ALL, with_layers=True)
    layers = fleet(f"{name}, layers", half, users, hours, Signals.NONE, with_layers=True)
    standing = standing_among(layers, scale.capacities(users), scale.main)
    for arm in (HINTED, BARE_ARM, PRICE_ARM):
        plan.add(both, arm, scale.main)
    plan.add(layers, HINTED, standing)
    plan.add(layers, BY_DEFAULT, standing)
    for hostile in (False, True):
        of_four = of_tenants(
            told, f"{name}, {'one hostile' if hostile else 'four'}", hostile=hostile
        )
        plan.add(of_four, OTHERS_ARM, scale.main)


def _plan_conversations(plan: _Plan, path: Path | None) -> None:
    if path is None and not CONVERSATIONS.exists():
        return
    path = path or CONVERSATIONS
    if not path.exists():
        raise InputError(f"{path}: there is no trace; name one with --mooncake")
    trace, scale = load_trace(path), plan.scale
    if scale.conversations_share < 1:
        trace = trace.head(scale.conversations_share)
    plan.conversations = trace.name
    standing = standing_among(trace, list(scale.conversations_ladder))
    plan.add(trace, BY_DEFAULT, sorted({*scale.conversations, *standing}))
    plan.add(trace, HINTED, scale.conversations)


def standing_among(trace: Trace, capacities: list[int], always: tuple[int, ...] = ()) -> list[int]:
    """The capacities at which LRU finds neither too little nor nearly everything."""

    def stands(capacity: int) -> bool:
        rate = lru_hits(trace, capacity).sum() / max(1, trace.prompt_blocks)
        return bool(STANDS[0] <= rate <= STANDS[1])

    return [capacity for capacity in capacities if capacity in always or stands(capacity)]


def _figures(plan: _Plan, rates: Rates) -> Figures:
    figures, scale = Figures("policies"), plan.scale

    def gaps(arm: str, what: str = "{}") -> list[float]:
        return [rates.gap(what.format(name), arm, scale.main) for name in plan.fleets]

    inferred = gaps(BY_DEFAULT)
    fast = gaps(BY_DEFAULT, f"{{}}, {FAST:g} × faster")
    figures.add("gap_inferred", inferred, "of the gap", "≥ 0.36")
    figures.add("gap_inferred_least", min(inferred), "of the gap", "≥ 0.33")
    figures.add("gap_stops", gaps(HINTED, "{}, stops"), "of the gap", "≥ 0.42")
    _add_layers(figures, plan, rates)
    worst = min(rates.points(cell) for cell in plan.plain)
    figures.add("worst_points_vs_lru", worst, "points", "≥ -0.1")
    shift = [quick - own for quick, own in zip(fast, inferred, strict=True)]
    figures.add("fast_clock_gap", max(shift, key=abs), "of the gap", "within ± 0.05")
    wild = [cell for cell in plan.cells if cell.arm.startswith(NONSENSE_ARM)]
    figures.add("nonsense_points", min(map(rates.points, wild)), "points", "≥ -0.5")
    if plan.conversations is not None:
        for figure, arm, target in (("inferred", BY_DEFAULT, "0.25"), ("ends", HINTED, "0.75")):
            gap = rates.gap(plan.conversations, arm, scale.conversations)
            figures.add(f"mooncake_gap_{figure}", gap, "of the gap", f"≥ {target}")
    return figures


def _add_layers(figures: Figures, plan: _Plan, rates: Rates) -> None:
    """What naming layers costs those who name them, and those who do not."""
    rate, main = rates.rates, plan.scale.main
    told, both, alone, errors, hostile = [], [], [], [], []
    for name in plan.fleets:
        told.append(rates.gap(name, HINTED, main))
        both.append(rates.gap(f"{name}, signals and layers", HINTED, main))
        for cell in (each for each in plan.cells if each.trace == f"{name}, layers"):
            if cell.arm == HINTED:
                nothing_said = rate[cell._replace(arm=BY_DEFAULT)]
                alone.append(100 * (rate[cell] - nothing_said))
        for capacity in main:
            cell = Cell(f"{name}, signals and layers", PRICE_ARM, capacity)
            cost = rate[cell._replace(arm=BARE_ARM)] - rate[cell._replace(arm=HINTED)]
            errors.append(100 * abs(rate[cell] - cost))
            quiet = rate[Cell(f"{name}, four", OTHERS_ARM, capacity)]
            hostile.append(100 * (quiet - rate[Cell(f"{name}, one hostile", OTHERS_ARM, capacity)]))
    figures.add("told_share", told, "of the gap", "≥ 0.65")
    figures.add("told_layers_share", both, "of the gap", "≥ 0.65, ≥ told_share - 0.01")
    figures.add("layers_alone_points", min(alone), "points", "≥ -0.5")
    figures.add("protection_price_error_points", max(errors), "points", "≤ 0.3")
    figures.add("hostile_layers_points", max(hostile), "points", "≤ 0.5")


def _raw(plan: _Plan, rates: Rates, figures: Figures) -> dict[str, Any]:
    tables: dict[str, Any] = {}
    for cell, rate in sorted(rates.rates.items()):
        row = tables.setdefault(cell.trace, {}).setdefault(cell.arm, {})
        row[str(cell.capacity)] = round(rate, 6)
    return {**figures.as_dict(), "requests": _sizes(plan), "rates": tables}


def _sizes(plan: _Plan) -> dict[str, int]:
    return {name: len(trace) for name, trace in plan.traces.items()}
