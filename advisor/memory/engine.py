"""Sends a chat's prompt to an engine in a form that it accepts, and reads its answer."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Final, NamedTuple

import orjson

from ..fleet.callers import Body, Call
from ..fleet.upstream import NothingAnsweredError, Reply, Upstream
from .chat import MOST_TOKENS, Message
from .requests import ChatRequest

_PLAIN_S: Final = 600.0
"""Seconds until an engine that rejected hints gets some again. Chosen: it may have been replaced by
then, and a refusal costs little.
"""
_OK: Final = 200
_REFUSED: Final = frozenset({400, 403, 422})  # refusals for a request's content
_FAILED: Final = frozenset({500, 501})  # so servers may answer what they cannot read, or write


class Form(IntEnum):
    """Forms of a request, in the order in which they are tried."""

    OURS = 0  # our messages, with hints
    PLAIN = 1  # our messages alone: some servers refuse or fail on unknown fields
    OWN = 2  # the client's own messages: some templates require alternating roles


class EnginePrompt(NamedTuple):
    """A chat's request, in each form."""

    request: ChatRequest
    sent: Sequence[Message]  # our messages
    tags: Sequence[object]  # hints about them
    recalls: bool  # whether recall is requested, unless the client decides
    # The client's own messages: the body as it came, or the whole chat if the client appends.
    own: bytes | Sequence[Message]
    salt: str = ""  # cache salt if text may come back; empty for the client's own

    def body(self, form: Form) -> bytes:
        if form is Form.OURS:
            return self.request.body(self.sent, self.tags, self.recalls, self.salt)
        if form is Form.PLAIN:
            return self.request.plain(self.sent)
        return (
            self.own
            if isinstance(self.own, bytes)
            else self.request.body(self.own, (), False, self.salt)
        )


class EngineAsker:
    """Sends requests to one engine, and remembers for a while that it rejects hints."""

    def __init__(self, plain_s: float = _PLAIN_S) -> None:
        self._plain_s = plain_s
        self._hints_from = 0.0

    async def begin(self, engine: Upstream, call: Call, prompt: EnginePrompt) -> tuple[Reply, Form]:
        """Send a request in the first form that the engine accepts; return the answer's beginning,
        and the form. Raises NothingAnsweredError, BadRequestError, and orjson.JSONEncodeError where
        its hints are nested too deeply.
        """
        first = Form.OURS if time.monotonic() >= self._hints_from else Form.PLAIN
        used, body = first, prompt.body(first)
        reply, tried = await _send(engine, call, body), [body]
        for form in list(Form)[first + 1 :]:
            may = reply.status in _REFUSED or (reply.status in _FAILED and call.repeatable)
            if not may:
                break
            body = prompt.body(form)
            if orjson.loads(body) in map(orjson.loads, tried):
                continue
            reply.close()
            used, reply = form, await _send(engine, call, body)
            tried.append(body)
        if first is Form.OURS and used is Form.PLAIN and reply.status == _OK:
            self._hints_from = time.monotonic() + self._plain_s
        return reply, used


async def _send(engine: Upstream, call: Call, body: bytes) -> Reply:
    return await engine.begin(call._replace(body=Body(body)))


_START_S: Final = 2.0  # to wait for the engine at the start; chosen: people wait for it
_PATH: Final = "/v1/models"  # answered by engines and routers alike

_log = logging.getLogger(__name__)


async def warn_if_unreachable(engine: Upstream) -> None:
    """Log a warning if the engine does not answer at the start; it may start later."""
    try:
        await engine.ask(_PATH, _START_S)
    except NothingAnsweredError as error:
        _log.warning(
            "the engine at %s does not answer (%s): until it does, requests get status 502",
            engine.url,
            error,
        )


_MOST: Final = 64 << 20  # most bytes of an answer that are read; chosen: beyond any
_DONE: Final = b"[DONE]"  # the last event of a stream
_TEXTS: Final = ("content", "reasoning_content", "reasoning", "refusal")


class CompletionReader:
    """Collects the message from a completion's first choice; malformed answers yield none."""

    def __init__(self, streams: bool) -> None:
        self.streams = streams
        self.is_over = False  # whether a stream's last event was read
        self._rest = bytearray()
        self._size = 0
        self._message: dict[str, Any] = {}
        self._parts: dict[str, list[str]] = {}  # of a text; joined once: each join copies it
        self._calls: list[dict[str, Any]] = []  # of an answer that came as a whole
        self._begun: dict[int, dict[str, Any]] = {}  # of a stream: parts likewise
        self._ended = self._is_odd = False
        self.prompt_tokens = 0  # the engine's count; 0 if it gave none

    def feed(self, chunk: bytes) -> None:
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
        """Return the assistant's message; None if there is none, or it has not ended."""
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
        """Return the valid ones of called tools; anything else marks the answer as odd."""
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
    """Return the first choice of an answer or event, if it is there."""
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
