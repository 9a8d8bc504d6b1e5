"""`kvgraph replay` and `kvgraph record`."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .trace import ReplayError

DEFAULT_CAPACITIES: Final = "1000,2000,5000,10000,20000"

Traces = Annotated[list[Path], typer.Argument(help="Trace files, gzipped or not.")]
Capacity = Annotated[str, typer.Option(help="Blocks of the pool, separated by commas.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one line of JSON per trace.")]
BlockSize = Annotated[
    int | None, typer.Option(min=1, help="Tokens per hash id; without it, as the trace says.")
]
Processes = Annotated[int, typer.Option(min=1, max=64, help="Processes that simulate.")]


def replay(
    traces: Traces,
    capacity: Capacity = DEFAULT_CAPACITIES,
    policy: Annotated[
        str | None,
        typer.Option(help="Names separated by commas; without it, or with all, every policy."),
    ] = None,
    analyze: Annotated[bool, typer.Option(help="Instead of policies: where LRU loses.")] = False,
    service: Annotated[bool, typer.Option(help="Simulate how long requests take.")] = False,
    interval: Annotated[float, typer.Option(min=0.01, help="Seconds between rankings.")] = 0.5,
    block_size: BlockSize = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="A sidecar's TOML file, of which score.* and policy.guard count; without it, "
            "the defaults."
        ),
    ] = None,
    processes: Processes = 2,
    picture: Annotated[Path | None, typer.Option(help="Save the picture here (PNG).")] = None,
    as_json: AsJson = False,
) -> None:
    """Replay traces: what would each eviction policy have found in the cache?"""
    from .arms import chosen_arms
    from .tables import draw, hit_table

    capacities = parse_capacities(capacity)
    settings = _settings(interval, service, config)
    arms = chosen_arms([name.strip() for name in (policy or "all").split(",")])
    ignored = {"--policy": policy, "--picture": picture, "--config": config}
    if analyze and (given := [name for name, value in ignored.items() if value]):
        raise ReplayError(f"--analyze goes without {', '.join(given)}: leave it out")
    if missing := [str(path) for path in traces if not path.exists()]:
        raise ReplayError(f"{', '.join(missing)}: there is no such file")
    check_writable("--picture", picture)
    for path in traces:
        trace = _load(path, block_size, as_json)
        if analyze:
            _analyze(trace, capacities, as_json)
            continue
        with progress_bar("policies × capacities", as_json) as update:
            table = hit_table(
                trace, arms, capacities, settings, processes=processes, progress=update
            )
        if as_json:
            typer.echo(json.dumps(table.as_dict()))
        else:
            _print(table)
        if picture is not None:  # after the figures: a full disk costs the picture alone
            draw(table, picture)


def check_writable(option: str, path: Path | None, replaced: bool = False) -> None:
    """Refuse a file that cannot be written, or ``replaced`` by another, before anything is
    computed. Raises ReplayError.
    """
    if path is None:
        return
    wrong = None
    if path.is_dir():
        wrong = "is a directory; allowed: a file"
    elif not path.parent.is_dir():
        wrong = f"there is no directory {str(path.parent)!r}"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        wrong = "cannot be written: permission denied"
    elif replaced and path.is_file() and not os.access(path.resolve().parent, os.W_OK):
        wrong = "cannot be replaced: nothing may be written to its directory"
    if wrong:
        raise ReplayError(f"{option} {str(path)!r}: {wrong}")


def _settings(interval: float, service: bool, config: Path | None) -> Any:
    from .arms import Settings
    from .graph_order import Planning
    from .simulator import Load

    planning, load = Planning(interval), Load() if service else None
    if config is None:
        return Settings(planning, load=load)
    from ..config.config import load as load_config

    read = load_config(config)
    return Settings(planning, read.profile(), read.policy.guard, load)


def parse_capacities(text: str) -> list[int]:
    """Parse capacities in blocks, as ``parse_numbers`` does."""
    allowed = f"whole numbers of blocks from 1 to {_MOST_BLOCKS:,}, e.g. {DEFAULT_CAPACITIES}"
    return parse_numbers("--capacity", text, int, allowed, most=_MOST_BLOCKS)


_MOST_BLOCKS: Final = 1 << 31  # chosen: a thousand times the largest pools
Number = TypeVar("Number", int, float)


def parse_numbers(
    option: str,
    text: str,
    kind: Callable[[str], Number],
    allowed: str,
    least: int = 1,
    most: float = math.inf,
) -> list[Number]:
    """Parse numbers separated by commas, and sort them; raises ReplayError."""
    with suppress(ValueError):
        numbers = sorted({kind(part) for part in text.split(",")})
        if all(least <= number <= most for number in numbers):
            return numbers
    raise ReplayError(f"{option} {text!r}: allowed: {allowed}")


def _print(table: Any) -> None:
    from .tables import rates_table

    console = Console()
    console.print(rates_table(table))
    for note in table.notes:
        console.print(f"note: {note}", style="yellow", markup=False)
    console.print(f"{table.seconds:.1f} s", style="dim")


def _analyze(trace: Any, capacities: list[int], as_json: bool) -> None:
    from .analysis import analyze, losses_table

    losses = [analyze(trace, capacity) for capacity in capacities]
    if as_json:
        found = {str(c): loss.as_dict() for c, loss in zip(capacities, losses, strict=True)}
        typer.echo(json.dumps({"trace": trace.name, "losses": found}))
    else:
        Console().print(losses_table(trace, capacities, losses))


def _load(path: Path, block_size: int | None, quiet: bool) -> Any:
    from .reader import load_trace

    with Console(stderr=True, quiet=quiet).status(f"reading {path.name}"):
        return load_trace(path, block_size=block_size)


@contextmanager
def progress_bar(what: str, quiet: bool) -> Iterator[Any]:
    """Show a progress bar on stderr; yields ``update(done, total)``."""
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=quiet) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


_TIPS_ONLY: Final = "the sidecar was overloaded, and engines told their last blocks only"


def record(
    out: Annotated[Path, typer.Argument(help="The file to write; gzipped if it ends in .gz.")],
    endpoint: Annotated[str | None, typer.Option(help="As for `kvgraph serve`.")] = None,
    config: Annotated[Path | None, typer.Option(help="As for `kvgraph serve`.")] = None,
) -> None:
    """Run a sidecar that also writes what its engines do, as a trace without texts or names."""
    from .. import service
    from ..config.config import load
    from .recorder import Recorder

    overrides = {} if endpoint is None else {"sidecar.endpoint": endpoint}
    load(config, overrides)  # a wrong one leaves no empty file, which the next call would refuse
    recorder = Recorder(out)
    try:
        service.serve(config, overrides, None, recorder)
    finally:
        recorder.close()
        most = "at most " if recorder.failed else ""  # what was buffered is lost
        typer.echo(f"{most}{recorder.written} requests written to {out}", err=True)
        if recorder.left_out:
            typer.echo(f"{recorder.left_out} left out: {_TIPS_ONLY}", err=True)
    if recorder.failed:
        raise ReplayError(f"{out} is cut short: a write failed, as the log says")
