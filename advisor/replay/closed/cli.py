"""``kvgraph closed``."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ....graph.messages.advice import HOLD_MAX_S
from ..cli import parse_capacities
from ..errors import ReplayError
from ..recordings.weka import Session
from ..traces.duration import AGENTS_SERVICE

if TYPE_CHECKING:
    from .loop import Loop
    from .loop_arms import ClosedCell, ClosedRow, Plan


class Part(StrEnum):
    """Which sessions of those that are found, by the rank of their names."""

    ALL = "all"
    ODD = "odd"
    EVEN = "even"


def part_of(sessions: Sequence[Session], part: Part) -> list[Session]:
    """Those sessions; the first is odd."""
    ordered = sorted(sessions, key=lambda session: session.name)
    return {Part.ALL: ordered, Part.ODD: ordered[::2], Part.EVEN: ordered[1::2]}[part]


PrefillRate = Annotated[float, typer.Option(min=1, help="Prompt tokens per second.")]
DecodeTime = Annotated[float, typer.Option(min=0, help="Seconds per output token.")]


def closed(
    sessions: Annotated[Path, typer.Argument(help="A Weka session, or a directory of them.")],
    capacity: Annotated[str, typer.Option(help="Blocks of 512 tokens, by commas.")] = "2000",
    users: Annotated[
        str, typer.Option(help="Agents at once, separated by commas.")
    ] = "12,16,20,24",
    arm: Annotated[
        str, typer.Option(help="lru, lpm or policies; +hints, +host, +admission behind; by commas.")
    ] = "lru,default,default+admission",
    hours: Annotated[
        float, typer.Option(min=0.01, max=100, help="Hours that the loop runs.")
    ] = 3.0,
    warm: Annotated[float, typer.Option(min=0, help="Hours that are not counted.")] = 1.0,
    begin: Annotated[float, typer.Option(min=0, help="Hours within which users begin.")] = 0.5,
    bound: Annotated[float, typer.Option(min=0, help="Seconds of the longest hold.")] = HOLD_MAX_S,
    host: Annotated[float, typer.Option(min=0, help="Host memory of +host arms, in pools.")] = 1.0,
    prefill: PrefillRate = AGENTS_SERVICE.prefill_tokens_per_s,
    decode: DecodeTime = AGENTS_SERVICE.decode_s_per_token,
    part: Annotated[Part, typer.Option(help="Which sessions, by rank.")] = Part.ALL,
    seed: Annotated[int, typer.Option(help="Seed of the order of sessions.")] = 1,
    processes: Annotated[int, typer.Option(min=1, max=64)] = 2,
    picture: Annotated[Path | None, typer.Option(help="Save the picture here (PNG).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON.")] = False,
) -> None:
    """Play recorded agents who wait for answers: where does an engine collapse?"""
    from ..traces.duration import ServiceModel
    from .loop import Loop

    if not warm < hours:
        raise ReplayError(f"--warm {warm:g}: allowed: less than the {hours:g} hours played")
    loop = Loop(
        users=1, seconds=3600 * hours, begin_s=3600 * begin, warm_s=3600 * warm, bound_s=bound,
        service=ServiceModel(prefill, decode),
    )  # fmt: skip
    cells = _cells(arm, capacity, users)
    rows = _played(partial(_plan, sessions, part, loop, host, seed), cells, processes, as_json)
    _show(rows, picture, as_json)


def _cells(arm: str, capacity: str, users: str) -> list[ClosedCell]:
    """Every arm at every number of users at every capacity.

    Raises:
        ReplayError: One of the three lists is not what is allowed.
    """
    from .loop_arms import Arm, ClosedCell

    arms = [name.strip() for name in arm.split(",")]
    for name in arms:
        Arm.of(name)
    return [
        ClosedCell(name, blocks, agents)
        for blocks in parse_capacities(capacity)
        for agents in _numbers(users)
        for name in arms
    ]


def _plan(path: Path, part: Part, loop: Loop, host: float, seed: int) -> Plan:
    from ..recordings.weka import read_sessions
    from .loop_arms import Plan

    return Plan(part_of(read_sessions(path), part), loop, host, seed)


def _played(
    plan: Callable[[], Plan], cells: Sequence[ClosedCell], processes: int, quiet: bool
) -> list[ClosedRow]:
    """Play the cells, and show how far that is unless ``quiet``."""
    from .loop_arms import closed_rows

    with _bar(quiet) as progress:
        task = progress.add_task("reading sessions", total=len(cells))
        read = plan()
        progress.update(task, description="loops")
        return closed_rows(
            read, cells, processes, lambda done, _: progress.update(task, completed=done)
        )


def _show(rows: Sequence[ClosedRow], picture: Path | None, as_json: bool) -> None:
    from .loop_report import closed_table, draw_cliff

    if picture is not None:
        draw_cliff(rows, picture)
    if as_json:
        typer.echo(json.dumps({"rows": [row.as_dict() for row in rows]}))
    else:
        Console().print(closed_table(rows))


def _numbers(text: str) -> list[int]:
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError:
        numbers = [0]
    if numbers[0] < 1:
        raise ReplayError(f"--users {text!r}: allowed: how many at once, e.g. 12,16,20,24")
    return numbers


def _bar(quiet: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(
        *columns, TimeElapsedColumn(), console=Console(stderr=True), disable=quiet
    )  # fmt: skip
