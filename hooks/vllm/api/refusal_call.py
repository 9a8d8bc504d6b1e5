"""One HTTP request on its way through vLLM's API process, which may still be refused."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_GONE: Final = {"type": "http.disconnect"}


class Call:
    """Stands between server and application.

    Args:
        receive: The server's; what the client sends.
        send: The server's; what the client gets.
    """

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        self._start: Message | None = None  # status and headers, until there is more to send
        self._begun, self._gone = asyncio.Event(), asyncio.Event()

    @property
    def began(self) -> bool:
        """Whether the client got something."""
        return self._begun.is_set()

    async def begins(self, task: asyncio.Future[None], within_s: float) -> bool:
        """Whether the answer begins, or ``task`` ends, within so many seconds."""
        begun = asyncio.ensure_future(self._begun.wait())
        either: set[asyncio.Future[Any]] = {task, begun}
        try:
            await asyncio.wait(either, timeout=within_s, return_when=_FIRST)
        finally:
            begun.cancel()
        return self.began or task.done()

    def hang_up(self) -> None:
        """To the application the client is gone; nothing that it says gets any further."""
        self._gone.set()

    async def refuse(self, body: bytes, retry_after_s: int) -> None:
        """Answer 429 in place of the application."""
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"retry-after", str(max(1, retry_after_s)).encode()),
        ]
        await self._send({"type": "http.response.start", "status": 429, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    # The application's --------------------------------------------------------------------------

    async def receive(self) -> Message:
        """What comes next from the client; that it is gone, once it was hung up on."""
        real = asyncio.ensure_future(self._receive())
        gone = asyncio.ensure_future(self._gone.wait())
        try:
            await asyncio.wait({real, gone}, return_when=_FIRST)
            return real.result() if real.done() else dict(_GONE)
        finally:
            real.cancel()
            gone.cancel()

    async def send(self, message: Message) -> None:
        """Status and headers wait for what follows them."""
        if self._gone.is_set():
            return
        if message["type"] == "http.response.start":
            self._start = message
            return
        start, self._start = self._start, None
        self._begun.set()
        if start is not None:
            await self._send(start)
        await self._send(message)


_FIRST: Final = asyncio.FIRST_COMPLETED
