"""What `kvgraph bench policies` plays: hit rates of arms on traces at capacities."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
from kvgraph.advisor.policies.registry import DEFAULT, new_policy
from kvgraph.advisor.replay.arms import BY_DEFAULT, HINTS, Settings, new_orders, run_arm, run_cells
from kvgraph.advisor.replay.graph_order import GraphOrder, SimulatedSidecar
from kvgraph.advisor.replay.simulator import Instance, simulate
from kvgraph.advisor.replay.trace import Ints, Trace
from kvgraph.graph.ranking.policy import Policy, ScoreProfile, Scores, Terms, View
from kvgraph.graph.tables.blocks import Selection
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from ..errors import InputError

JOURNAL: Final = Path(".bench") / "policies.jsonl"
_SOURCES: Final = Path(__file__).parents[3]
_PLAYED: Final = ("graph", "advisor/policies", "advisor/replay", "advisor/admission")
"""Folders whose code decides what a cell finds."""

AnyCell = Sequence[Any]


class Journal:
    """A line for every cell that was played, written as soon as it is done."""

    def __init__(self, path: Path, of: str, resume: bool) -> None:
        self._path = path
        self._found: dict[str, Any] = {}
        if resume and path.exists():
            self._read(of)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("")  # an interruption may have cut its last line
        except OSError as error:
            raise InputError(f"{path}: cannot be written: {error.strerror}") from error
        self._write({"of": of})
        for cell, found in self._found.items():
            self._write({"cell": cell, "found": found})

    def __len__(self) -> int:
        return len(self._found)

    def known(self, kind: str, cell: AnyCell) -> Any | None:
        """What a cell found, as JSON gives it; None: it was not played yet."""
        return self._found.get(_name(kind, cell))

    def note(self, kind: str, cell: AnyCell, found: Any) -> None:
        """Write down what a cell found: numbers, or a mapping of some."""
        self._found[_name(kind, cell)] = found
        self._write({"cell": _name(kind, cell), "found": found})

    def _write(self, line: Mapping[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _read(self, of: str) -> None:
        lines = _whole_lines(self._path)
        if not lines or lines[0].get("of") != of:
            raise InputError(
                f"{self._path}: is of other traffic or of another version of the code; "
                "start anew without --resume, or name another file with --journal"
            )
        self._found = {line["cell"]: line["found"] for line in lines[1:]}


def fingerprint(traces: Mapping[str, Trace], more: str = "") -> str:
    """A digest of traffic, and of the code that plays it: equal ones find the same in a cell."""
    digest = hashlib.sha256(more.encode())
    for name, trace in sorted(traces.items()):
        digest.update(f"{name} {len(trace)} {trace.has_sessions}".encode())
        for column in (trace.at, trace.blocks, trace.starts, trace.output_tokens):
            digest.update(column.tobytes())
    for folder in _PLAYED:
        for path in sorted((_SOURCES / folder).rglob("*")):
            if path.suffix in (".py", ".npz"):
                digest.update(path.read_bytes())
    return digest.hexdigest()


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a journal; one that an interruption cut is left out."""
    try:
        text = path.read_text()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    lines = text.split("\n")[:-1]
    try:
        return [json.loads(line) for line in lines]
    except ValueError as error:
        raise InputError(f"{path}: is no journal of this bench: {error}") from error


def _name(kind: str, cell: AnyCell) -> str:
    return json.dumps([kind, *cell])


Shared = TypeVar("Shared")
Played = TypeVar("Played", bound=tuple[Any, ...])


class Course:
    def __init__(self, journal: Journal, processes: int, console: Console) -> None:
        self._journal = journal
        self._processes = processes
        self._console = console

    def play(
        self,
        kind: str,
        run: Callable[[Shared, Played], float],
        shared: Shared,
        cells: Sequence[Played],
        effort: Callable[[Played], float] = lambda cell: 1.0,
    ) -> dict[Played, float]:
        known = {cell: self._journal.known(kind, cell) for cell in cells}
        found = {cell: rate for cell, rate in known.items() if rate is not None}
        left = [cell for cell in cells if cell not in found]
        if found:
            self._console.print(f"{kind}: {len(found)} cells are known from an earlier run")
        columns = (
            TextColumn(kind),
            BarColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[said]}"),
        )
        with Progress(*columns, console=self._console) as shown:
            task = shown.add_task(kind, total=sum(map(effort, left)), said="")
            for cell, result in run_cells(run, shared, left, self._processes) if left else ():
                self._journal.note(kind, cell, result)
                found[cell] = result
                name = " ".join(map(str, cell))
                shown.update(task, advance=effort(cell), said=f"{name}: {result:.4f}")
        return found


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
