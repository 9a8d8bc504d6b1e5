"""``EngineAsker``: puts a chat's prompt to an engine in a form that it takes."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Final, NamedTuple

import httpx
import orjson

from ..fleet.callers import Body, Call
from ..fleet.upstream import NothingAnsweredError, Reply, Upstream
from .chat import MOST_TOKENS, Message
from .requests import ClientWords

_PLAIN_S: Final = 600.0
"""Until an engine that takes no hints gets some again; chosen: it may be another by then, and to be
refused once costs little."""
_OK, _REFUSED = 200, 400


class Form(IntEnum):
    """How a request is put, in the order in which that is tried."""

    OURS = 0
    """Our messages, with hints."""
    PLAIN = 1
    """Our messages alone: servers exist that refuse fields which they do not know."""
    OWN = 2
    """What its client means: some templates want roles to alternate."""


class Prompt(NamedTuple):
    """A chat's request, in each form.

    Attributes:
        sent: Our messages.
        tags: Hints about them.
        recalls: Whether the engine may recall, unless the client says.
        own: What the client means: the body as it came, or all of the chat if it appends.
        salt: Of the cache, where text may come back; empty: the client's.
    """

    words: ClientWords
    sent: Sequence[Message]
    tags: Sequence[object]
    recalls: bool
    own: bytes | Sequence[Message]
    salt: str = ""

    def body(self, form: Form) -> bytes:
        """The request's body."""
        if form is Form.OURS:
            return self.words.body(self.sent, self.tags, self.recalls, self.salt)
        if form is Form.PLAIN:
            return self.words.plain(self.sent)
        return (
            self.own
            if isinstance(self.own, bytes)
            else self.words.body(self.own, (), False, self.salt)
        )


class EngineAsker:
    """Asks one engine, and remembers for a while whether it takes hints.

    Args:
        plain_s: Seconds for which an engine that takes none gets none.
    """

    def __init__(self, plain_s: float = _PLAIN_S) -> None:
        self._plain_s = plain_s
        self._hints_from = 0.0

    async def begin(self, engine: Upstream, call: Call, prompt: Prompt) -> tuple[Reply, Form]:
        """The beginning of an answer, and to which form; of those that are the same, one is tried.

        Args:
            call: The client's, whose body is replaced.

        Raises:
            NothingAnsweredError: The engine is gone.
            BadRequestError: The request cannot be passed on.
            orjson.JSONEncodeError: Its hints are nested deeper than JSON is written here.
        """
        first = Form.OURS if time.monotonic() >= self._hints_from else Form.PLAIN
        used, body = first, prompt.body(first)
        reply, tried = await _send(engine, call, body), [body]
        for form in list(Form)[first + 1 :]:
            if reply.status != _REFUSED:
                break
            body = prompt.body(form)
            if orjson.loads(body) in map(orjson.loads, tried):
                continue
            await reply.response.aclose()
            used, reply = form, await _send(engine, call, body)
            tried.append(body)
        if first is Form.OURS and used is Form.PLAIN and reply.status == _OK:
            self._hints_from = time.monotonic() + self._plain_s
        return reply, used


async def _send(engine: Upstream, call: Call, body: bytes) -> Reply:
    return await engine.begin(call._replace(body=Body(body)))


# Whether an engine can be reached: said in the log at the start, and to clients later.

_START_S: Final = 2.0  # for a word of the engine's at the start; chosen: people wait for it
_PATH: Final = "/v1/models"  # which engines and routers answer alike
_BAD_GATEWAY: Final = 502

_log = logging.getLogger(__name__)


async def warn_if_unreachable(engine: Upstream) -> None:
    """Ask an engine once; the log says so if it does not answer. It may come later."""
    try:
        await engine.ask(_PATH, _START_S)
    except httpx.RequestError as error:
        _log.warning("the engine at %s does not answer (%s): until it does, requests get status %d",
                     engine.url, f"{type(error).__name__} {error}".strip(),
                     _BAD_GATEWAY)  # fmt: skip


def gone(engine: Upstream, call: Call, error: NothingAnsweredError) -> Reply:
    """What a client reads whose engine answers nothing: where that is, and what is known of it."""
    if not error.sent:
        what = "cannot be reached"
    elif call.repeatable:
        what = "dropped this request"
    else:
        what = "dropped this request, and may have done what it asks"
    said = {
        "message": f"the engine at {engine.url} {what}: {error}",
        "type": "service_unavailable",
        "code": _BAD_GATEWAY,
    }
    body = orjson.dumps({"error": said})
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    response = httpx.Response(_BAD_GATEWAY, stream=httpx.ByteStream(body))
    return Reply(_BAD_GATEWAY, headers, b"", response, response.aiter_raw())


# ``CompletionReader``: the assistant's message, read off an answer while it is passed on.

_MOST: Final = 64 << 20  # bytes of an answer that are read; chosen: beyond any
_DONE: Final = b"[DONE]"  # the last event of a stream
_TEXTS: Final = ("content", "reasoning_content", "reasoning", "refusal")


class CompletionReader:
    """Reads the first choice of a chat's completion; whatever it cannot read is no message.

    Args:
        streams: Whether it comes as server-sent events.

    Attributes:
        streams: As given.
        is_over: Whether a stream's last event was read.
        prompt_tokens: What the engine counted; 0: it did not say.
    """

    def __init__(self, streams: bool) -> None:
        self.streams = streams
        self.is_over = False
        self._rest = bytearray()
        self._size = 0
        self._message: dict[str, Any] = {}
        self._parts: dict[str, list[str]] = {}  # of a text; joined once: each join copies it
        self._calls: list[dict[str, Any]] = []  # of an answer that came as a whole
        self._begun: dict[int, dict[str, Any]] = {}  # of a stream: parts likewise
        self._ended = self._is_odd = False
        self.prompt_tokens = 0

    def feed(self, chunk: bytes) -> None:
        """Take over bytes as they come."""
        self._size += len(chunk)
        if self._size > _MOST:
            return
        self._rest += chunk
        if self.streams and b"\n" in chunk:
            *lines, last = self._rest.split(b"\n")
            self._rest = bytearray(last)
            for line in lines:
                self._line(bytes(line))

    def message(self) -> Message | None:
        """The assistant's message; None if there is none, or it has not ended."""
        if self._size > _MOST:
            return None
        if not self.streams:
            self._whole(_object(bytes(self._rest)))
        texts = {field: "".join(parts) for field, parts in self._parts.items()}
        calls = self._calls or [_call_of(begun) for _, begun in sorted(self._begun.items())]
        if not self._ended or self._is_odd or not (texts or self._message or calls):
            return None
        said: dict[str, Any] = {"role": "assistant", "content": "", **self._message, **texts}
        if calls:
            said["tool_calls"] = calls
        try:
            orjson.dumps({"messages": [said]})
        except orjson.JSONEncodeError:  # it is nested deeper than JSON is written here
            return None
        return said

    def _line(self, line: bytes) -> None:
        if line.startswith(b"data:"):
            data = line.removeprefix(b"data:").strip()
            self.is_over |= data == _DONE
            event = _object(data)
            self._usage(event)
            for choice in _choices(event):
                self._delta(choice.get("delta"))
                self._ended |= choice.get("finish_reason") is not None

    def _delta(self, delta: object) -> None:
        if not isinstance(delta, dict):
            return
        for field in _TEXTS:
            if isinstance(text := delta.get(field), str):
                self._parts.setdefault(field, []).append(text)
        for part in self._listed(delta.get("tool_calls")):
            self._call(part)

    def _call(self, part: dict[str, Any]) -> None:
        number = part.get("index")
        number = number if isinstance(number, int) else len(self._begun)
        call = self._begun.setdefault(number, {"id": "", "name": [], "arguments": []})
        call["id"] = part.get("id") or call["id"]
        function = part.get("function")
        said = function if isinstance(function, dict) else {}
        for field in ("name", "arguments"):
            text = said.get(field) or ""
            if isinstance(text, str):
                call[field].append(text)
            else:
                self._is_odd = True

    def _whole(self, answer: dict[str, Any]) -> None:
        self._usage(answer)
        for choice in _choices(answer):
            said = choice.get("message")
            said = said if isinstance(said, dict) else {}
            self._message = {field: said[field] for field in _TEXTS if said.get(field)}
            self._calls = self._listed(said.get("tool_calls"))
            self._ended = True

    def _listed(self, calls: object) -> list[dict[str, Any]]:
        """Called tools, or parts of them; what is none makes an answer odd."""
        listed = calls if isinstance(calls, list) else []
        found = [each for each in listed if isinstance(each, dict)]
        self._is_odd |= bool(calls) and (calls != found)
        return found

    def _usage(self, answer: dict[str, Any]) -> None:
        usage = answer.get("usage")
        counted = usage.get("prompt_tokens") if isinstance(usage, dict) else None
        if isinstance(counted, int) and 0 <= counted < MOST_TOKENS:
            self.prompt_tokens = counted


def _call_of(begun: dict[str, Any]) -> dict[str, Any]:
    function = {field: "".join(begun[field]) for field in ("name", "arguments")}
    return {"id": begun["id"], "type": "function", "function": function}


def _choices(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """The first choice, if it is among those of an answer or of a part of it."""
    listed = answer.get("choices")
    listed = listed if isinstance(listed, list) else ()
    found = [each for each in listed if isinstance(each, dict)]
    return [each for each in found if each.get("index", 0) == 0][:1]


def _object(data: bytes) -> dict[str, Any]:
    try:
        read = orjson.loads(data)
    except orjson.JSONDecodeError:
        return {}
    return read if isinstance(read, dict) else {}
