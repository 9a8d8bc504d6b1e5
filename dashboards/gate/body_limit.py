"""Refuses bodies that are longer than any question: they are read before a token is looked at."""

from __future__ import annotations

from typing import Any, Final

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

MOST_BODY_BYTES: Final = 2 << 20
"""Of a request's body; chosen: the longest question (256 wishes whose names are all escaped) has
1.2 MB."""
_REFUSED: Final = f"the body is too long; allowed: {MOST_BODY_BYTES} bytes"
_HEADERS: Final = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}
_WITHOUT_BODY: Final = frozenset({"GET", "HEAD"})  # nobody reads theirs, if they have one


class BodyLimit:
    """ASGI middleware: answers 413 to a longer body, by its announced length or as it comes."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what is short enough."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        lengths = [int(value) for key, value in scope["headers"] if key == b"content-length"]
        if any(length > MOST_BODY_BYTES for length in lengths):
            refusal = JSONResponse({"detail": _REFUSED}, 413, _HEADERS)
            return await refusal(scope, receive, send)
        if scope["method"] not in _WITHOUT_BODY:
            receive = _Counted(receive)
        return await self._app(scope, receive, send)


class _Counted:
    """Receives a body as long as it is short enough."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._bytes = 0

    async def __call__(self) -> Any:
        """The next message; raises what is answered by 413."""
        message = await self._receive()
        self._bytes += len(message.get("body", b""))
        if self._bytes > MOST_BODY_BYTES:
            raise HTTPException(413, _REFUSED, _HEADERS)
        return message
