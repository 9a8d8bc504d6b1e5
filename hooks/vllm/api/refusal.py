"""Middleware for vLLM's API process: answers 429 to requests that are held too long.

Off unless the operator adds it:

    vllm serve … --middleware kvgraph.hooks.vllm.api.refusal.RefuseWhoWaits

Only the engine knows which sessions are live and resident, and it holds none of their requests. So
a client is refused only while the sidecar lists its request as held. A request in vLLM's own queue
is never refused, and neither is any request while the sidecar cannot be reached.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any, Final
from uuid import uuid4

import prometheus_client

from ....graph.wire.events import MAX_NAME
from ...access import answer_of
from ...settings import engine_settings

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_GONE: Final = {"type": "http.disconnect"}


class PendingCall:
    """Stands before the application, so that a request can be refused until its answer begins."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        self._start: Message | None = None  # status and headers, until there is more to send
        self._begun, self._gone = asyncio.Event(), asyncio.Event()

    @property
    def began(self) -> bool:
        return self._begun.is_set()

    async def begins(self, task: asyncio.Future[None], within_s: float) -> bool:
        """Return whether the answer begins, or ``task`` ends, within ``within_s`` seconds."""
        begun = asyncio.ensure_future(self._begun.wait())
        either: set[asyncio.Future[Any]] = {task, begun}
        try:
            await asyncio.wait(either, timeout=within_s, return_when=_FIRST)
        finally:
            begun.cancel()
        return self.began or task.done()

    def disconnect(self) -> None:
        """Tell the application that its client has gone, and discard what it still sends."""
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
        real = asyncio.ensure_future(self._receive())
        gone = asyncio.ensure_future(self._gone.wait())
        try:
            await asyncio.wait({real, gone}, return_when=_FIRST)
            return real.result() if real.done() else dict(_GONE)
        finally:
            real.cancel()
            gone.cancel()

    async def send(self, message: Message) -> None:
        """Pass on the application's message; status and headers wait for the first body message."""
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


logger = logging.getLogger(__name__)

_FRESH_S: Final = 0.5  # an answer is reused for this long; chosen

_OF_VLLM: Final = r"(?:\d+_)?(?:chatcmpl-(?P<chat>.+)|cmpl-(?P<completion>.+)-\d+)"
"""Ids that vLLM's API makes of a request's name: the answer's number before it if ``n`` is above 1,
and a completion's prompt number after it."""
_RANDOM: Final = r"-[0-9a-f]{8}"  # suffix, unless the operator switched it off
_OF_BATCH: Final = re.compile(r"_\d+$")  # suffix of a batch of chats, and of some single chats


class WaitingRequests:
    """Asks the engine's sidecar which requests are held, at most twice a second."""

    def __init__(
        self,
        ask: Callable[[], Collection[str]] | None = None,  # returns all held request ids; may raise
        clock: Callable[[], float] = time.monotonic,  # monotonic seconds
    ) -> None:
        self._ask = ask or ask_sidecar
        self._clock = clock
        self._lock = asyncio.Lock()
        self._names: frozenset[str] = frozenset()
        self._asked_at = float("-inf")

    async def holds(self, name: str) -> bool:
        """Return whether a request of this name is held now; False if unknown."""
        async with self._lock:
            if self._clock() - self._asked_at >= _FRESH_S:
                self._names = await asyncio.to_thread(self._fresh)
                self._asked_at = self._clock()
        return name in self._names

    def _fresh(self) -> frozenset[str]:
        """The names of all held requests; on its own thread, since there may be thousands."""
        try:
            return names_of(self._ask())
        except Exception as error:  # a broken sidecar must not fail the client's request
            logger.debug("kvgraph: nobody says which requests are held: %s", type(error).__name__)
            return frozenset()


def names_of(ids: Collection[str]) -> frozenset[str]:
    """Return the client-side names of chat and completion requests with these ids.

    Names are never guessed: ids of another form, truncated ids, and chats that may belong to a
    batch are left out.
    """
    made = re.compile(_OF_VLLM + ("" if _is_plain() else _RANDOM))
    found = [made.fullmatch(each) for each in ids if len(each) < MAX_NAME]
    chats = {each["chat"] for each in found if each and each["chat"]}
    completions = {each["completion"] for each in found if each and each["completion"]}
    return frozenset(completions | {each for each in chats if not _OF_BATCH.search(each)})


def _is_plain() -> bool:
    from vllm import envs

    return bool(getattr(envs, "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", False))


def ask_sidecar() -> Collection[str]:
    """Return the ids of all requests that engines hold; raises OSError or ValueError."""
    from ....graph.errors import ConfigError
    from ....graph.wire.endpoints import running_sidecars

    endpoint = engine_settings().sidecar
    try:
        known = [each for each in running_sidecars() if each.endpoint == endpoint]
    except ConfigError as error:
        raise OSError(str(error)) from None
    if not known:
        raise OSError(f"no sidecar of this user listens on {endpoint!r}")
    return answer_of(known[0], "/waiting").keys()


App = Callable[[Scope, Receive, Send], Awaitable[None]]

_ASK_S: Final = 1.0  # between questions about one request; chosen
_LEAST_NAME: Final = 16
"""Characters of an ``X-Request-Id`` below which no request is refused: the id may be a part of
another one. Chosen."""
_END_S: Final = 5.0  # for vLLM to abort a request whose client has gone; chosen
_HEADER: Final = b"x-request-id"
_REFUSED: Final = prometheus_client.Counter(  # shown with vLLM's own, on its /metrics
    "kvgraph_refused_requests", "Requests answered 429 since they were held for too long"
)


class RefuseWhoWaits:
    """Answers 429 to requests that are still held ``AITHER_KVCACHE_REFUSE_AFTER_S`` seconds after
    they arrived.

    ``Retry-After`` is the same number of seconds. Status and headers are kept back until the body
    begins; until then the request can still be refused. vLLM sees a refused request as one whose
    client disconnected.
    """

    def __init__(self, app: App, waiting: WaitingRequests | None = None) -> None:
        self._app = app
        self._after_s = engine_settings("refuse_after_s").refuse_after_s
        self._waiting = waiting or WaitingRequests()
        self._names: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        name, scope = _named(scope)
        self._names[name] += 1
        call = PendingCall(receive, send)
        task = asyncio.ensure_future(self._app(scope, call.receive, call.send))
        try:
            await self._follow(name, call, task)
        finally:
            task.cancel()
            self._names[name] -= 1
            if not self._names[name]:
                del self._names[name]

    async def _follow(self, name: str, call: PendingCall, task: asyncio.Future[None]) -> None:
        wait_s = self._after_s
        while not await call.begins(task, wait_s):
            wait_s = _ASK_S
            if await self._is_held(name) and not call.began:
                call.disconnect()
                await asyncio.wait({task}, timeout=_END_S)
                task.add_done_callback(_forget)
                await call.refuse(_refusal(self._after_s), math.ceil(self._after_s))
                _REFUSED.inc()
                return
        await task

    async def _is_held(self, name: str) -> bool:
        """Return whether an engine holds the request of this name, and the name is unambiguous."""
        if len(name) < _LEAST_NAME or self._names[name] > 1:
            return False
        return await self._waiting.holds(name)


def _forget(task: asyncio.Future[None]) -> None:
    """Read an abandoned request's outcome, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()


def _named(scope: MutableMapping[str, Any]) -> tuple[str, MutableMapping[str, Any]]:
    """Return the request id that vLLM will use, and a scope whose headers carry it."""
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
