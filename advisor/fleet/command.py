"""`kvgraph route`: one address in front of several engines."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from ...graph.errors import ConfigError
from ...graph.wire.endpoints import RunningSidecar, running_sidecars
from ..config.config import check_regular
from ..process.process import check_address, checked_hosts, log_for_people, refuse_remote, serve_at
from ..tools.remote import TOKEN_VARIABLE, secret_of
from .app import route_app
from .proxy import FleetProxy
from .residency import ResidencyView
from .upstream import (
    FIRST_BYTE_S,
    MOST_SHOWN,
    EngineAddress,
    checked,
    engine_in,
    engines_in,
    is_address,
)

FirstByte = Annotated[
    float,
    typer.Option(
        min=1,
        help="Seconds without a byte of an answer after which a request goes to another "
        "engine; where answers are not streamed, only if the engine's health is silent too.",
    ),
]

AskSidecars = Annotated[
    bool,
    typer.Option(
        "--sidecars/--no-sidecars", help="Ask this user's sidecars what engines really hold."
    ),
]

NamedSidecars = Annotated[
    list[str] | None,
    typer.Option(
        "--sidecar",
        help="The URL of a sidecar of another machine, asked as well; may be repeated. All of them "
        "have one token, the environment's (docs/fleet.md).",
    ),
]


AllowedHosts = Annotated[
    list[str] | None,
    typer.Option(
        help="A name under which this address is known beside its own, as by a reverse proxy that "
        "passes Host on; may be repeated."
    ),
]


def route(
    engines: Annotated[
        list[str] | None, typer.Argument(help="Engines' addresses: http://127.0.0.1:8001 …")
    ] = None,
    engines_file: Annotated[
        Path | None,
        typer.Option(
            "--engines",
            help="A file with one address per line, reread when it changes; 'URL drain' sends no "
            "further requests there.",
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Where to listen.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="The port; 0 picks a free one.")
    ] = 8000,
    allow_remote: Annotated[
        bool, typer.Option(help="Listen beyond loopback: whoever reaches it may use the engines.")
    ] = False,
    ask_sidecars: AskSidecars = True,
    named_sidecars: NamedSidecars = None,
    first_byte: FirstByte = FIRST_BYTE_S,
    allowed_host: AllowedHosts = None,
) -> None:
    """One OpenAI-compatible address in front of several engines: sessions go where their KV is."""
    refuse_remote(host, allow_remote)
    if named_sidecars and not ask_sidecars:
        raise ConfigError("--sidecar and --no-sidecars exclude each other")
    hosts = checked_hosts(allowed_host or [])
    given = _engines(engines or [], engines_file)
    log_for_people()
    residency = ResidencyView(sidecars_with(named_sidecars or [])) if ask_sidecars else None

    async def serve() -> None:
        """Serve until a signal, and then finish what runs."""
        at = await check_address(host, port)
        proxy = FleetProxy(given, residency, first_byte_s=first_byte)
        rereading = asyncio.create_task(_reread(proxy, engines_file)) if engines_file else None
        _log.info("engines behind http://%s:%d: %d", host, at, len(given))
        try:
            await serve_at(route_app(proxy), host, at, hosts)
        finally:
            if rereading is not None:
                rereading.cancel()

    asyncio.run(serve())


def _engines(engines: list[str], file: Path | None) -> list[EngineAddress]:
    if (file is None) == (not engines):
        raise ConfigError("name engines either by their addresses or by --engines FILE")
    if file is None:
        return checked([engine_in(each) for each in engines])
    check_regular(file)
    return engines_in(file)


_REREAD_S: Final = 1.0  # between two checks of the file; chosen

_log = logging.getLogger(__name__)


async def _reread(proxy: FleetProxy, file: Path) -> None:
    """Apply the file whenever it changes; a bad one is logged and changes nothing."""
    seen = _stamp(file)
    while True:
        await asyncio.sleep(_REREAD_S)
        if (stamp := _stamp(file)) == seen:
            continue
        seen = stamp
        try:
            check_regular(file)
            proxy.engines.list_again(engines_in(file))
        except ConfigError as error:
            _log.error("%s; the list stays as it was", error)
        except Exception:  # a bug of ours: the file is read again when it changes
            _log.exception("kvgraph cannot take over %s; the list stays as it was", file)


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def sidecars_with(others: Sequence[str]) -> Callable[[], list[RunningSidecar]]:
    """Return a function that lists this machine's sidecars and those at the URLs ``others``.
    Raises ConfigError.
    """
    urls = [url.rstrip("/") for url in others]
    if wrong := [url for url in urls if not is_address(url)]:
        raise ConfigError(f"--sidecar {wrong[0][:MOST_SHOWN]!r}: allowed: http://HOST:PORT")
    named = [RunningSidecar(0, "", url, secret_of(url)) for url in dict.fromkeys(urls)]

    if not all(each.token.isascii() for each in named):
        raise ConfigError(f"{TOKEN_VARIABLE}: allowed: letters, digits and ._~+/=-")
    try:
        running_sidecars()
    except ConfigError as error:
        _log.warning("sidecars of this machine are not asked: %s", error)
    return lambda: [*named, *(each for each in _here() if each.http not in urls)]


def _here() -> list[RunningSidecar]:
    try:
        return running_sidecars()
    except ConfigError:
        return []
