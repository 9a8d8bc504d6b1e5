"""Middleware for vLLM's API process: answers 429 to requests that are held too long.

Off unless the operator adds it:

    vllm serve … --middleware kvgraph.hooks.vllm.api.refusal.RefuseWhoWaits

Only the engine knows which sessions are live and resident, and it holds none of their requests. So
a client is refused only while the sidecar lists its request as held; a request in vLLM's own queue
is never refused, and none is while the sidecar cannot be asked.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final
from uuid import uuid4

import prometheus_client

from ..settings import refuse_after_s
from .refusal_call import Call, Receive, Scope, Send
from .waiting_requests import WaitingRequests

App = Callable[[Scope, Receive, Send], Awaitable[None]]

_ASK_S: Final = 1.0  # between questions about one request; chosen
_LEAST_NAME: Final = 16
"""Characters of an ``X-Request-Id`` below which it may be part of another's; chosen."""
_END_S: Final = 5.0  # for vLLM to abort a request whose client has gone; chosen
_HEADER: Final = b"x-request-id"
_REFUSED: Final = prometheus_client.Counter(  # among vLLM's own, on its /metrics
    "kvgraph_refused_requests", "Requests answered 429 since they were held for too long"
)


class RefuseWhoWaits:
    """Answers 429 to requests that came ``AITHER_KVCACHE_REFUSE_AFTER_S`` seconds ago, have no
    answer, and are held then or later.

    ``Retry-After`` is the same number of seconds. Status and headers are kept back until the first
    bytes of the body exist; until then the request can still be refused. vLLM sees a refused
    request as one whose client disconnected.

    Args:
        app: vLLM's, with all other middleware.
        waiting: Knows which requests are held; the sidecar's answers if none is given.
    """

    def __init__(self, app: App, waiting: WaitingRequests | None = None) -> None:
        self._app = app
        self._after_s = refuse_after_s()
        self._waiting = waiting or WaitingRequests()
        self._names: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request of a client, or refuse it."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        name, scope = _named(scope)
        self._names[name] += 1
        call = Call(receive, send)
        task = asyncio.ensure_future(self._app(scope, call.receive, call.send))
        try:
            await self._follow(name, call, task)
        finally:
            task.cancel()
            self._names[name] -= 1
            if not self._names[name]:
                del self._names[name]

    async def _follow(self, name: str, call: Call, task: asyncio.Future[None]) -> None:
        """Wait until the answer is over, or refuse the request."""
        wait_s = self._after_s
        while not await call.begins(task, wait_s):
            wait_s = _ASK_S
            if await self._is_held(name) and not call.began:
                call.hang_up()
                await asyncio.wait({task}, timeout=_END_S)
                task.add_done_callback(_forget)
                await call.refuse(_refusal(self._after_s), math.ceil(self._after_s))
                _REFUSED.inc()
                return
        await task

    async def _is_held(self, name: str) -> bool:
        """Whether an engine holds the request of this name, and no other can be meant."""
        if len(name) < _LEAST_NAME or self._names[name] > 1:
            return False
        return await self._waiting.holds(name)


def _forget(task: asyncio.Future[None]) -> None:
    """Read the outcome of an abandoned request, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()


def _named(scope: MutableMapping[str, Any]) -> tuple[str, MutableMapping[str, Any]]:
    """What vLLM will call a request, by the header that it heeds; one is given where none is."""
    for key, value in scope["headers"]:
        if key.lower() == _HEADER:
            return value.decode("latin-1"), scope
    name = uuid4().hex
    return name, {**scope, "headers": [*scope["headers"], (_HEADER, name.encode())]}


def _refusal(after_s: float) -> bytes:
    message = (
        "this engine has no room for this session's context, which it does not have now, and let "
        f"the request wait for {after_s:.0f} s; try again later"
    )
    error = {"message": message, "type": "Too Many Requests", "param": None, "code": 429}
    return json.dumps({"error": error}).encode()
