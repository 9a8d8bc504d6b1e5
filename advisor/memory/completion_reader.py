"""``CompletionReader``: the assistant's message, read off an answer while it is passed on."""

from __future__ import annotations

from typing import Any, Final

import orjson

from .chats.chat_blocks import MOST_TOKENS, Message

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
        self._calls: dict[int, dict[str, Any]] = {}
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
        if not self._ended or self._is_odd or not (self._message or self._calls):
            return None
        said = {"role": "assistant", "content": "", **self._message}
        if self._calls:
            said["tool_calls"] = [call for _, call in sorted(self._calls.items())]
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
                self._message[field] = self._message.get(field, "") + text
        for part in self._listed(delta.get("tool_calls")):
            self._call(part)

    def _call(self, part: dict[str, Any]) -> None:
        number = part.get("index")
        number = number if isinstance(number, int) else len(self._calls)
        empty = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
        call = self._calls.setdefault(number, empty)
        call["id"] = part.get("id") or call["id"]
        function = part.get("function")
        said = function if isinstance(function, dict) else {}
        for field in ("name", "arguments"):
            text = said.get(field) or ""
            if isinstance(text, str):
                call["function"][field] += text
            else:
                self._is_odd = True

    def _whole(self, answer: dict[str, Any]) -> None:
        self._usage(answer)
        for choice in _choices(answer):
            said = choice.get("message")
            said = said if isinstance(said, dict) else {}
            self._message = {field: said[field] for field in _TEXTS if said.get(field)}
            self._calls = dict(enumerate(self._listed(said.get("tool_calls"))))
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
