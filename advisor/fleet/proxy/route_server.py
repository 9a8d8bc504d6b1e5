"""Serves the proxy, and rereads its list of engines."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ....graph.errors import ConfigError
from ...process.http_service import serve_at
from ..residency.residency_view import ResidencyView
from .engine_list import Listed, engines_in
from .fleet_proxy import FleetProxy
from .proxy_app import ProxyApp

_REREAD_S: Final = 1.0  # between two looks at the list; chosen

_log = logging.getLogger(__name__)


async def serve_route(
    engines: Sequence[Listed],
    engines_file: Path | None,
    host: str,
    port: int,
    residency: ResidencyView | None,
    first_byte_s: float,
    allowed_hosts: Sequence[str] = (),
) -> None:
    """Serve until told to stop, and then finish what runs.

    Args:
        engines_file: The file that lists the engines, if one does.
        residency: What sidecars say; None: none is asked.
        first_byte_s: For which an engine may be silent before the first byte of an answer.
        allowed_hosts: Names under which the proxy is addressed, beside its own.
    """
    proxy = FleetProxy(engines, residency, first_byte_s=first_byte_s)
    rereading = asyncio.create_task(_reread(proxy, engines_file)) if engines_file else None
    _log.info("%d engines behind http://%s:%d", len(engines), host, port)
    try:
        await serve_at(ProxyApp(proxy), host, port, allowed_hosts)
    finally:
        if rereading is not None:
            rereading.cancel()


async def _reread(proxy: FleetProxy, file: Path) -> None:
    """Take over the file whenever it has changed; a bad one is named, and changes nothing."""
    seen = _stamp(file)
    while True:
        await asyncio.sleep(_REREAD_S)
        if (stamp := _stamp(file)) == seen:
            continue
        seen = stamp
        try:
            proxy.engines.list_again(engines_in(file))
        except ConfigError as error:
            _log.error("%s; the list stays as it was", error)
        except Exception:  # ours: it is looked at again when it changes
            _log.exception("kvgraph cannot take over %s; the list stays as it was", file)


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size
