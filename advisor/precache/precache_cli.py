"""``kvgraph precache``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from ...graph.errors import ConfigError
from ..remote import RemoteError

if TYPE_CHECKING:
    from .precache_config import PrecacheConfig
    from .warmer import Lease, Prefix, Warmed

_LEASED: Final = ("accepted", "clipped")


def precache(
    file: Annotated[Path, typer.Argument(help="A TOML file that names a server and prefixes.")],
    watch: Annotated[
        bool, typer.Option("--watch", help="Keep them: sweep again and again, until Ctrl-C.")
    ] = False,
) -> None:
    """Have stable prefixes computed before anybody asks, on any OpenAI-compatible server."""
    from .precache_config import read_precache  # the other commands need none of these
    from .warmer import Warmer

    config = read_precache(file)
    prefixes = _prefixes(config, file.absolute().parent)
    warmer = Warmer(config.server, lease=_lease() if config.pin else None)
    while True:
        done = warmer.sweep(prefixes)
        for each in done:
            typer.echo(_line(each))
        if not watch:
            raise typer.Exit(1 if any(each.how == "failed" for each in done) else 0)
        time.sleep(_pause(config, prefixes))


def _prefixes(config: PrecacheConfig, directory: Path) -> list[Prefix]:
    from .warmer import Prefix

    found: dict[str, Prefix] = {}
    for each in config.prefix:
        key = each.key(directory)
        if key in found:
            raise ConfigError(f"two prefixes are {key}: give one of them a conversation")
        found[key] = Prefix(key, each.stable(directory), each.tools, each.seconds)
    return list(found.values())


def _pause(config: PrecacheConfig, prefixes: list[Prefix]) -> float:
    """Seconds until the next sweep; half of the shortest time to live, if that is less."""
    return min([config.sweep_s, *(each.seconds / 2 for each in prefixes)])


def _lease() -> Lease | None:
    """Asks this user's only sidecar; None without one."""
    from ..intents.intent_client import IntentClient

    try:
        client = IntentClient()
    except RemoteError:
        return None

    def lease(key: str, seconds: float) -> float:
        try:
            answer = client.pin(session=key, seconds=seconds)
        except RemoteError:
            return 0.0
        whole = answer.get("answer") in _LEASED and answer["blocks"] == answer["asked"]
        return float(answer["seconds"] or 0.0) if whole else 0.0

    return lease


def _line(done: Warmed) -> str:
    if done.how == "failed":
        return f"{done.key}: failed: {done.reason}"
    if done.how == "leased":
        return f"{done.key}: leased"
    return f"{done.key}: {done.how}, {done.cached:,} of {done.tokens:,} tokens were cached"
