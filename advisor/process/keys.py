"""``kvgraph keys``: creates CURVE keys for engines and a sidecar on several machines."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Final

import typer
import zmq

from ...graph.errors import ConfigError
from ...graph.wire.curve_keys import (
    ALLOWED,
    ENGINE,
    KEYS_VARIABLE,
    PUBLIC,
    SECRET,
    SIDECAR,
    SIDECAR_REMEDY,
    existing,
    explained,
    public_key,
)

_NAME: Final = re.compile(r"[\w.-]{1,64}")


def new_sidecar_keys(folder: Path) -> None:
    """Create a sidecar's key folder; raises ConfigError if it has keys already."""
    with explained(folder):
        folder.mkdir(0o700, parents=True, exist_ok=True)
        (folder / ALLOWED).mkdir(0o700, exist_ok=True)
        public, secret = zmq.curve_keypair()
        _write(
            {
                folder / f"{SIDECAR}{SECRET}": _text(public, secret),
                folder / f"{SIDECAR}{PUBLIC}": _text(public),
            }
        )


def new_engine_keys(sidecar: Path, name: str, folder: Path) -> Path:
    """Create an engine's key folder; return the file that allows it. Raises ConfigError."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"engine {name!r}: allowed: 1 to 64 letters, digits, '.', '_' and '-'")
    with explained(folder):
        if folder.resolve().is_relative_to(sidecar.resolve()):
            raise ConfigError(f"{str(folder)!r} is the sidecar's; an engine needs a folder apart")
        own = public_key(existing(sidecar / f"{SIDECAR}{PUBLIC}", SIDECAR_REMEDY))
        allowed = sidecar / ALLOWED / f"{name}{PUBLIC}"
        folder.mkdir(0o700, parents=True, exist_ok=True)
        allowed.parent.mkdir(0o700, exist_ok=True)
        public, secret = zmq.curve_keypair()
        _write(
            {
                folder / f"{ENGINE}{SECRET}": _text(public, secret),
                folder / f"{ENGINE}{PUBLIC}": _text(public),
                folder / f"{SIDECAR}{PUBLIC}": _text(own),
                allowed: _text(public),
            }
        )
    return allowed


def _text(public: bytes, secret: bytes | None = None) -> str:
    lines = ["#   made by `kvgraph keys`", "metadata", "curve"]
    lines.append(f'    public-key = "{public.decode()}"')
    if secret is not None:
        lines.append(f'    secret-key = "{secret.decode()}"')
    return "\n".join(lines) + "\n"


def _write(texts: dict[Path, str]) -> None:
    """Create files readable by their owner only; all or none of them."""
    made: list[Path] = []
    try:
        for path, text in texts.items():
            number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            made.append(path)
            with open(number, "w", encoding="ascii") as file:
                file.write(text)
    except BaseException:
        for path in made:
            path.unlink(missing_ok=True)
        raise


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
    name: Annotated[
        str, typer.Argument(help="A name for the engine, under which its key is allowed.")
    ],
    out: Annotated[Path, typer.Argument(help="A new folder for the engine's keys.")],
) -> None:
    """Make an engine's keys, and let it connect to the sidecar."""
    allowed = new_engine_keys(folder, name, out)
    typer.echo(
        f"take {out} to the engine's machine, and start it there with {KEYS_VARIABLE}=FOLDER "
        f"beside AITHER_KVCACHE_SIDECAR\nremove {allowed} to let it connect no more"
    )
