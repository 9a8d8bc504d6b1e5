"""``kvgraph precache``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from .warmer import Warmed


def precache(
    file: Annotated[Path, typer.Argument(help="A TOML file that names a server and prefixes.")],
    watch: Annotated[
        bool, typer.Option("--watch", help="Keep them: sweep again and again, until Ctrl-C.")
    ] = False,
) -> None:
    """Have stable prefixes computed before anybody asks, on any OpenAI-compatible server."""
    from .prefix_keeper import PrefixKeeper  # the other commands need none of it

    keeper = PrefixKeeper(file, lambda done: typer.echo(_line(done)))
    if watch:
        keeper.run()
    raise typer.Exit(1 if any(each.how == "failed" for each in keeper.sweep()) else 0)


def _line(done: Warmed) -> str:
    if done.how == "failed":
        return f"{done.key}: failed: {done.reason}"
    if done.how == "leased":
        return f"{done.key}: leased"
    return f"{done.key}: {done.how}, {done.cached:,} of {done.tokens:,} tokens were cached"
