"""``kvgraph precache``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

if TYPE_CHECKING:
    from .warmer import Warmed

_UNTOLD: Final = (
    "the server does not say how much was cached (vLLM does with --enable-prompt-tokens-details)"
)


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
    if done.how == "unknown":
        return f"{done.key}: computed, or there already: {_UNTOLD}"
    again = f"; {done.reason}" if done.reason else ""
    return f"{done.key}: {done.how}, {done.cached:,} of {done.tokens:,} tokens were cached{again}"
