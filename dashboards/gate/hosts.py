"""Refuses requests that a foreign web page made a browser send here (DNS rebinding)."""

from __future__ import annotations

from collections.abc import Collection

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send


class TrustedHosts:
    """ASGI middleware: answers only requests whose Host, and Origin if there is one, is among
    ``hosts``."""

    def __init__(self, app: ASGIApp, hosts: Collection[str]) -> None:
        self._app = app
        self._hosts = frozenset(host.lower().strip("[]") for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a trusted request on; answer any other with 400 or 403."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = scope["headers"]
        named = [value.decode("latin-1") for key, value in headers if key == b"host"]
        origins = [value.decode("latin-1") for key, value in headers if key == b"origin"]
        if len(named) != 1 or host_name(named[0]) not in self._hosts:
            refusal = PlainTextResponse("this Host is not served here\n", 400)
            return await refusal(scope, receive, send)
        if any(host_name(origin.partition("://")[2]) not in self._hosts for origin in origins):
            refusal = PlainTextResponse("requests of other origins are not served\n", 403)
            return await refusal(scope, receive, send)
        return await self._app(scope, receive, send)


def host_name(authority: str) -> str:
    """The name or address in ``host[:port]``, without the brackets of an IPv6 address."""
    if authority.startswith("["):
        return authority[1:].partition("]")[0].lower()
    return authority.partition(":")[0].lower()
