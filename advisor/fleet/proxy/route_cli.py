"""``kvgraph route``."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from ....graph.errors import ConfigError
from ...process.before_serving import log_for_people, refuse_remote
from .engine_list import FIRST_BYTE_S, Listed, checked, engine_in, engines_in

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
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8000,
    allow_remote: Annotated[
        bool, typer.Option(help="Listen beyond loopback: whoever reaches it may use the engines.")
    ] = False,
    ask_sidecars: AskSidecars = True,
    named_sidecars: NamedSidecars = None,
    first_byte: FirstByte = FIRST_BYTE_S,
    allowed_host: AllowedHosts = None,
) -> None:
    """One OpenAI-compatible address before several engines: sessions go where their KV is."""
    try:
        from ...process.http_service import checked_hosts
        from ..residency.residency_view import ResidencyView
        from .route_server import serve_route
        from .sidecar_list import sidecars_with
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{error.name} is missing; install it with pip install 'kvgraph[route]'"
        ) from None

    refuse_remote(host, allow_remote)
    if named_sidecars and not ask_sidecars:
        raise ConfigError("--sidecar and --no-sidecars exclude each other")
    hosts = checked_hosts(allowed_host or [])
    given = _engines(engines or [], engines_file)
    log_for_people()
    residency = ResidencyView(sidecars_with(named_sidecars or [])) if ask_sidecars else None
    asyncio.run(serve_route(given, engines_file, host, port, residency, first_byte, hosts))


def _engines(engines: list[str], file: Path | None) -> list[Listed]:
    if (file is None) == (not engines):
        raise ConfigError("name engines either by their addresses or by --engines FILE")
    return engines_in(file) if file else checked([engine_in(each) for each in engines])
