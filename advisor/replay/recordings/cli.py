"""``kvgraph traffic``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .signals import Signals


def traffic(
    sessions: Annotated[Path, typer.Argument(help="A Weka session, or a directory of them.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The trace; gzipped if it ends in .gz.")],
    users: Annotated[int, typer.Option(min=1, max=10_000, help="Users who work in parallel.")] = 40,
    hours: Annotated[
        float, typer.Option(min=0.001, max=1000, help="Hours that the fleet works.")
    ] = 3.0,
    seed: Annotated[int, typer.Option(help="Seed of the order, and of guesses.")] = 1,
    block: Annotated[int, typer.Option(min=1, max=65_535, help="Tokens per block.")] = 512,
    signals: Annotated[Signals, typer.Option(help="What callers say.")] = Signals.NONE,
    layers: Annotated[
        bool, typer.Option("--layers", help="Callers also say where tools and rules are.")
    ] = False,
    harnesses: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Heads (tools, then system prompt) that all sessions have between them; else "
            "sessions share tools of equal length, and the system prompt if that is equal, too.",
        ),
    ] = None,
) -> None:
    """Lay recorded agent sessions over users: a fleet, as a trace for `kvgraph replay`."""
    from .fleet import in_harnesses, lay_over_users
    from .traffic import trace_lines, write_trace
    from .weka import read_sessions

    with Console(stderr=True).status("reading sessions") as status:
        found = read_sessions(
            sessions, progress=lambda files: status.update(f"reading sessions: {files}")
        )
        if harnesses is not None:
            found = in_harnesses(found, harnesses, seed)
        status.update("laying them over users")
        requests = lay_over_users(found, users, hours * 3600, seed)
        status.update(f"writing {out.name}")
        lines = trace_lines(requests, block, signals, seed, with_layers=layers)
        write_trace(lines, out)
    runs = len({request.run for request in requests})
    typer.echo(f"{len(requests):,} requests of {runs:,} sessions written to {out}", err=True)
