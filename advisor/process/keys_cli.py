"""``kvgraph keys``: keys for engines and a sidecar that are on several machines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...graph.ipc.curve_keys import KEYS_VARIABLE
from .new_keys import new_engine_keys, new_sidecar_keys

keys = typer.Typer(no_args_is_help=True, add_completion=False)
Folder = Annotated[Path, typer.Argument(help="Where the sidecar's keys are.")]


@keys.callback()
def _about() -> None:
    """Make CURVE keys, for engines and a sidecar that are on several machines."""


@keys.command()
def sidecar(folder: Folder) -> None:
    """Make a sidecar's keys."""
    new_sidecar_keys(folder)
    typer.echo(
        f"kvgraph serve --endpoint tcp://HOST:PORT --set sidecar.keys={folder.resolve()}\n"
        f"then, for each engine: kvgraph keys engine {folder} NAME FOLDER"
    )


@keys.command()
def engine(
    folder: Folder,
    name: Annotated[str, typer.Argument(help="Of the engine; in the list of those allowed.")],
    out: Annotated[Path, typer.Argument(help="Where the engine's keys go.")],
) -> None:
    """Make an engine's keys, and let it connect to the sidecar."""
    allowed = new_engine_keys(folder, name, out)
    typer.echo(
        f"take {out} to the engine's machine, and start it there with {KEYS_VARIABLE}=FOLDER "
        f"beside AITHER_KVCACHE_SIDECAR\nremove {allowed} to let it connect no more"
    )
