"""``LivePage``: one address to watch a whole demo at, whatever runs behind it."""

from __future__ import annotations

import secrets
import socket
import tempfile
from pathlib import Path
from typing import Any, Final, Self

from kvgraph.dashboards.access import page_address

from ..sidecars.sidecar_process import SidecarProcess

ENDPOINT: Final = "AITHER_KVCACHE_SIDECAR"
"""Tells an engine where to link to instead of to a sidecar of its own."""

_HEADER: Final = "# Weights that are applied on the page are written here.\n"


class LivePage:
    """A sidecar with its page; a context manager. Whoever opens its address may edit weights.

    A sidecar remembers what it learned and who asked, so each scene of a demo gets a new one. It
    stands at the same address and takes the same token: a page that is open goes on with it.
    """

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._folder = tempfile.TemporaryDirectory(prefix="kvg-")
        directory, self._token = Path(self._folder.name), secrets.token_hex(16)
        (config := directory / "kvgraph.toml").write_text(_HEADER)
        self._sidecar = SidecarProcess(
            directory, port=port, config=config, token=self._token, policy__guard="true"
        )

    def __enter__(self) -> Self:
        self._sidecar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._sidecar.kill()
        self._folder.cleanup()

    @property
    def endpoint(self) -> str:
        """Where engines connect to it."""
        return self._sidecar.endpoint

    @property
    def address(self) -> str:
        """What to open in a browser, to look at and to edit weights: the demo is one's own."""
        return page_address(self._sidecar.http, self._token, edit=True) + "&now"

    @property
    def invitation(self) -> str:
        """Where to watch it, and how commands find its sidecar, whose runtime note is its own."""
        ask = f"XDG_RUNTIME_DIR={self._folder.name} kvgraph top"
        return f"watch it at {self.address}\nor in a terminal: {ask} (or why, explain, status)"

    def status(self) -> dict[str, Any]:
        """What its sidecar says of itself now."""
        return self._sidecar.status()

    def begin_anew(self) -> None:
        """Forget all that was seen: the next scene begins."""
        self._sidecar.kill()
        self._sidecar.start()
