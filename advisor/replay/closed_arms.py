"""`kvgraph closed`: the arms of a closed loop, its cells, its table and its picture."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from ...graph.wire.advice import HOLD_MAX_S
from ..admission import Admission
from ..policies.registry import new_policy
from .analysis import percentile
from .arms import HINTS, all_cells, graph_policies
from .cli import Processes, check_writable, parse_capacities, parse_numbers, progress_bar
from .closed import Loop, Played, Queue, play, runs_for
from .fleet_traffic import Signals
from .graph_order import GraphOrder
from .recorded_sessions import Session, read_sessions
from .simulator import HostTier, Instance, LruOrder
from .tables import pyplot, save_picture, table_of
from .trace import AGENTS_SERVICE, ReplayError, ServiceModel

ADMISSION: Final = "+admission"
"""Suffix of an arm: new and cold sessions are held as the sidecar advises."""
HOST: Final = "+host"
"""Suffix of an arm, before the other: evicted blocks are copied to host memory, and loaded."""
LPM: Final = "lpm"
"""LRU eviction; waiting requests start with the longest prefix match first: SGLang's order."""
CLIENT_PATIENCE_S: Final = 600.0
"""Seconds after which a client gives up (the OpenAI client's default); its request is starved."""

_BLOCK: Final = 512  # tokens; chosen


class ClosedCell(NamedTuple):
    arm: str
    capacity: int
    users: int


@dataclass(frozen=True, slots=True)
class ClosedPlan:
    sessions: Sequence[Session]  # the sessions that users play
    loop: Loop  # parameters of the loop; the number of users is in each cell
    host: float = 1.0  # host memory of the arms that have some, in pools
    seed: int = 1


@dataclass(frozen=True, slots=True)
class ClosedRow:
    """A cell's result after warm-up; seconds unless stated otherwise."""

    arm: str
    capacity: int
    users: int
    turns_per_hour: float  # complete answers; refusals do not count
    sessions: int  # sessions that ended
    computed: float  # the share of prompt blocks that were computed
    # ``returning_p50``, ``returning_p95``: TTFT of sessions' later turns.
    returning_p50: float
    returning_p95: float
    # ``first_p50``, ``first_p95``: TTFT of their first turns.
    first_p50: float
    first_p95: float
    held: float  # the share of requests that waited for room
    longest_hold: float  # of any request, at any time
    starved: int  # requests that waited longer than a client does, at any time
    refused: int  # requests larger than the pool, at any time

    def as_dict(self) -> dict[str, Any]:
        return {k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class Arm:
    order: str  # ``lru``, ``lpm`` or a graph policy: the eviction order
    hints: bool  # whether callers name their sessions and state what the trace knows
    host: bool  # whether there is host memory below the pool
    admission: bool  # whether new and cold sessions are held

    @classmethod
    def of(cls, name: str) -> Arm:
        """Parse an arm's name; raises ReplayError."""
        bare = name.removesuffix(ADMISSION)
        named = bare.removesuffix(HOST)
        order = named.removesuffix(HINTS)
        known = {"lru", LPM, *graph_policies()}
        if order not in known or (order == LPM and order != named):
            raise ReplayError(
                f"arm {name!r}: allowed: {', '.join(sorted(known))}; {HINTS}, then {HOST} and then "
                f"{ADMISSION} may stand behind"
            )
        return cls(order, named != order, bare != named, name != bare)

    @property
    def is_stock(self) -> bool:
        return self.order in ("lru", LPM) and not self.hints and not self.admission


def closed_rows(
    plan: ClosedPlan,
    cells: Sequence[ClosedCell],
    processes: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[ClosedRow]:
    found = all_cells(run_cell, plan, cells, processes, progress)
    return [found[cell] for cell in cells]


def run_cell(plan: ClosedPlan, cell: ClosedCell) -> ClosedRow:
    """Play one cell; the same plan and cell give the same row."""
    arm = Arm.of(cell.arm)
    queue = Queue.LPM if arm.order == LPM else plan.loop.queue
    loop = replace(plan.loop, users=cell.users, queue=queue)
    runs = runs_for(
        plan.sessions, cell.users, loop.seconds, block_size=_BLOCK, seed=plan.seed,
        signals=Signals.ALL,
    )  # fmt: skip
    host = HostTier(round(plan.host * cell.capacity), plain=arm.is_stock) if arm.host else None
    if arm.is_stock:
        return _row(cell, loop, play(runs, Instance(cell.capacity, LruOrder(), host=host), loop))
    policy = "lru" if arm.order == LPM else graph_policies()[arm.order]
    order = GraphOrder.alone(runs.trace, new_policy(policy), hints=arm.hints)
    instance = Instance(cell.capacity, order, host=host)
    if not arm.admission:
        return _row(cell, loop, play(runs, instance, loop))
    word = partial(order.advised, Admission())
    return _row(cell, loop, play(runs, instance, loop, word=word))


def _row(cell: ClosedCell, loop: Loop, played: Played) -> ClosedRow:
    done = played.done >= loop.warm_s
    ttft = played.first_token - played.at
    counted = done & ~np.isnan(ttft)
    first, later = ttft[counted & played.opens], ttft[counted & ~played.opens]
    prompt = max(1, int(played.prompt[counted].sum()))
    end = np.where(np.isnan(played.started), loop.seconds, played.started)
    return ClosedRow(
        *cell,
        turns_per_hour=float(counted.sum()) / (loop.seconds - loop.warm_s) * 3600.0,
        sessions=int((played.ended >= loop.warm_s).sum()),
        computed=1.0 - float(played.found[counted].sum()) / prompt,
        returning_p50=percentile(later, 50),
        returning_p95=percentile(later, 95),
        first_p50=percentile(first, 50),
        first_p95=percentile(first, 95),
        held=float((played.held_s[counted] > 0).mean()) if counted.any() else 0.0,
        longest_hold=float(played.held_s.max(initial=0.0)),
        starved=int((end - played.at > CLIENT_PATIENCE_S).sum()),
        refused=played.refused,
    )


_GREY: Final = "#9aa0a6"
_COLORS: Final = ("#1a73e8", "#12a150", "#e37400", "#a142f4", "#d93025", "#00897b")


def closed_table(rows: Sequence[ClosedRow]) -> Table:
    heads = (
        "blocks", "agents", "arm", "turns per hour", "computed", "TTFT of returning p50 / p95",
        "of first turns p50 / p95", "held", "longest hold", "starved", "refused",
    )  # fmt: skip
    table = table_of("recorded agents in a closed loop", heads, ["arm"])
    for row in rows:
        table.add_row(
            f"{row.capacity:,}",
            str(row.users),
            row.arm,
            f"{row.turns_per_hour:,.0f}",
            f"{row.computed:.2f}",
            f"{row.returning_p50:.1f} / {row.returning_p95:.0f} s",
            f"{row.first_p50:.1f} / {row.first_p95:.0f} s",
            f"{row.held:.3f}",
            f"{row.longest_hold:.0f} s",
            str(row.starved),
            str(row.refused),
        )
    return table


def draw_cliff(rows: Sequence[ClosedRow], path: Path) -> None:
    """Save a picture of turns an hour and TTFT by agents, a row per capacity."""
    plots = pyplot()
    capacities = sorted({row.capacity for row in rows})
    arms = list(dict.fromkeys(row.arm for row in rows if row.arm != "lru"))
    colors = {"lru": _GREY, **dict(zip(arms, cycle(_COLORS), strict=False))}
    size = (11, 4.2 * len(capacities))
    figure, grid = plots.subplots(
        len(capacities), 2, figsize=size, layout="constrained", squeeze=False
    )
    for axes, capacity in zip(grid, capacities, strict=True):
        here = [row for row in rows if row.capacity == capacity]
        _panel(axes[0], here, colors, "turns_per_hour", f"Turns per hour, {capacity:,} blocks")
        axes[0].set_ylim(bottom=0)
        _panel(axes[1], here, colors, "returning_p50", "TTFT of returning turns, p50 (s)")
        axes[1].set_yscale("log")
    grid[0][0].legend(frameon=False, fontsize=9)
    figure.suptitle("Recorded agents in a closed loop on one engine", fontweight="bold")
    save_picture(figure, path)


def _panel(
    axes: Any, rows: Sequence[ClosedRow], colors: Mapping[str, str], what: str, title: str
) -> None:
    for arm in dict.fromkeys(row.arm for row in rows):
        points = sorted((row.users, getattr(row, what)) for row in rows if row.arm == arm)
        width = 2.6 if arm.endswith(ADMISSION) else 1.6
        line = {"color": colors[arm], "lw": width, "marker": "o", "ms": 4}
        axes.plot(*zip(*points, strict=True), label=arm, **line)
    axes.set_xlabel("agents")
    axes.set_xticks(sorted({row.users for row in rows}))
    axes.set_title(title, fontsize=11)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


class SessionPart(StrEnum):
    """Which of the sessions to play: all, or every other one in the order of their names."""

    ALL = "all"
    ODD = "odd"
    EVEN = "even"


def part_of(sessions: Sequence[Session], part: SessionPart) -> list[Session]:
    """Return the sessions of that part; the first session is odd."""
    begin, step = {"all": (0, 1), "odd": (0, 2), "even": (1, 2)}[part]
    return sorted(sessions, key=lambda session: session.name)[begin::step]


PrefillRate = Annotated[float, typer.Option(min=1, help="Prompt tokens per second.")]
DecodeTime = Annotated[float, typer.Option(min=0, help="Seconds per output token.")]


def closed(
    sessions: Annotated[Path, typer.Argument(help="A Weka session, or a directory of them.")],
    capacity: Annotated[
        str, typer.Option(help="Blocks of 512 tokens in the pool, separated by commas.")
    ] = "2000",
    users: Annotated[
        str, typer.Option(help="Numbers of agents at once, separated by commas.")
    ] = "12,16,20,24",
    arm: Annotated[
        str,
        typer.Option(
            help="What to play, separated by commas: lru, lpm (LRU; the longest match starts "
            "first) or a policy; behind each, any of +hints, +host and +admission."
        ),
    ] = "lru,default,default+admission",
    hours: Annotated[
        float, typer.Option(min=0.01, max=100, help="Hours that the loop runs.")
    ] = 3.0,
    warm: Annotated[
        float, typer.Option(min=0, help="Of these, first hours that are not counted.")
    ] = 1.0,
    begin: Annotated[float, typer.Option(min=0, help="Hours over which users begin.")] = 0.5,
    bound: Annotated[
        float, typer.Option(min=0, help="Seconds for which +admission holds a request at most.")
    ] = HOLD_MAX_S,
    host: Annotated[
        float, typer.Option(min=0, help="Host memory of +host, in sizes of the pool.")
    ] = 1.0,
    prefill: PrefillRate = AGENTS_SERVICE.prefill_tokens_per_s,
    decode: DecodeTime = AGENTS_SERVICE.decode_s_per_token,
    part: Annotated[
        SessionPart,
        typer.Option(help="Which sessions: all, or every other one in the order of their names."),
    ] = SessionPart.ALL,
    seed: Annotated[int, typer.Option(help="Seed of the order of sessions.")] = 1,
    processes: Processes = 2,
    picture: Annotated[Path | None, typer.Option(help="Save the picture here (PNG).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON.")] = False,
) -> None:
    """Play recorded agents who wait for answers: where does an engine collapse?"""
    if not warm < hours:
        raise ReplayError(f"--warm {warm:g}: allowed: less than the {hours:g} hours played")
    check_writable("--picture", picture)
    loop = Loop(
        users=1, seconds=3600 * hours, begin_s=3600 * begin, warm_s=3600 * warm, bound_s=bound,
        service=ServiceModel(prefill, decode),
    )  # fmt: skip
    cells = _cells(arm, capacity, users)
    with Console(stderr=True, quiet=as_json).status("reading sessions"):
        plan = ClosedPlan(part_of(read_sessions(sessions), part), loop, host, seed)
    with progress_bar("loops", as_json) as update:
        rows = closed_rows(plan, cells, processes, update)
    if as_json:
        typer.echo(json.dumps({"rows": [row.as_dict() for row in rows]}))
    else:
        Console().print(closed_table(rows))
    if picture is not None:  # after the figures: a full disk costs the picture alone
        draw_cliff(rows, picture)


def _cells(arm: str, capacity: str, users: str) -> list[ClosedCell]:
    arms = [name.strip() for name in arm.split(",")]
    for name in arms:
        Arm.of(name)
    return [
        ClosedCell(name, blocks, agents)
        for blocks in parse_capacities(capacity)
        for agents in parse_numbers("--users", users, int, "how many at once, e.g. 12,16,20,24")
        for name in arms
    ]
