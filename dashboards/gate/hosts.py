"""Refuses requests that a foreign web page made a browser send here (DNS rebinding)."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Final

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

_MOST_NAMED: Final = 64  # refused names that the log is told of; chosen
_LONGEST_NAME: Final = 80  # characters of one there; chosen

_log = logging.getLogger(__name__)


class TrustedHosts:
    """ASGI middleware: answers only requests whose Host, and Origin if there is one, is among
    ``hosts``. The log names each other one once.

    Args:
        option: By which an operator allows one more.
    """

    def __init__(
        self, app: ASGIApp, hosts: Collection[str], option: str = "http.allowed_hosts"
    ) -> None:
        self._app = app
        self._hosts = frozenset(host.lower().strip("[]") for host in hosts)
        self._option = option
        self._named: set[str] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a trusted request on; answer any other with 400 or 403."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = scope["headers"]
        named = [value.decode("latin-1") for key, value in headers if key == b"host"]
        origins = [value.decode("latin-1") for key, value in headers if key == b"origin"]
        if len(named) != 1 or host_name(named[0]) not in self._hosts:
            self._name("Host", ", ".join(named) or "none")
            refusal = PlainTextResponse("this Host is not served here\n", 400)
            return await refusal(scope, receive, send)
        if any(host_name(origin.partition("://")[2]) not in self._hosts for origin in origins):
            self._name("Origin", ", ".join(origins))
            refusal = PlainTextResponse("requests of other origins are not served\n", 403)
            return await refusal(scope, receive, send)
        return await self._app(scope, receive, send)

    def _name(self, header: str, refused: str) -> None:
        """Tell the log what is refused; anybody may send anything."""
        said = f"{header} {refused[:_LONGEST_NAME]!r}"
        if said not in self._named and len(self._named) < _MOST_NAMED:
            self._named.add(said)
            _log.warning(
                "a request with %s is refused; allowed: %s; %s adds one",
                said, ", ".join(sorted(self._hosts)), self._option,
            )  # fmt: skip


def host_name(authority: str) -> str:
    """The name or address in ``host[:port]``, without the brackets of an IPv6 address."""
    if authority.startswith("["):
        return authority[1:].partition("]")[0].lower()
    return authority.partition(":")[0].lower()
