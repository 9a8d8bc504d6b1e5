"""``Block``: messages that leave a prompt, and come back to it, together.

A tool's results stay with the call that they answer, since engines refuse one without the other.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec
import orjson

Message = dict[str, Any]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
MOST_TOKENS: Final = 1 << 32  # of one prompt; chosen: an engine that says more says nonsense

_SOURCES: Final = {"system": "system", "developer": "system", "tool": "tool", "function": "tool"}
_THOUGHT: Final = re.compile(r"\A(?:\s*<think>)?(?:(?!<think>).)*?</think>\s*", re.DOTALL)
_THOUGHTS_END: Final = "</think>"
THOUGHTS: Final = ("reasoning_content", "reasoning")
"""Fields of a message that have an assistant's thoughts."""


class Block(msgspec.Struct):
    """One or more messages of a chat.

    Attributes:
        name: By which people know it; unique in its chat.
        source: ``system``, ``user``, ``assistant`` or ``tool``.
        messages: As engines get them; empty: forgotten, for want of room.
        digests: Of each message, as clients repeat it.
        tokens: What it takes of a prompt; 0: not counted yet.
        turn: In which it was said, or last came back.
        place: Where it stands in the prompt, behind all lower ones; None: it has left.
        tags: What its client said of it, in the words of a message's hints.
    """

    name: str
    source: str
    messages: list[Message]
    digests: list[bytes]
    turn: Count
    place: Count | None
    tokens: Count = 0
    tags: dict[str, Any] = {}

    @property
    def text(self) -> str:
        """What its messages say, with the names and arguments of called tools."""
        return "\n".join(part for each in self.messages for part in _texts(each))

    @property
    def identity(self) -> str:
        """By which an engine knows it: as its client calls it, or else its name."""
        said = self.tags.get("identity")
        return said if isinstance(said, str) and said else self.name

    @property
    def priority(self) -> float:
        """Its least score, from 0 to 1."""
        said = self.tags.get("priority")
        return min(max(said / 100, 0.0), 1.0) if isinstance(said, int | float) else 0.0

    @property
    def pinned(self) -> bool:
        """Whether it always stays."""
        return bool(self.tags.get("pinned"))

    @property
    def calls(self) -> bool:
        """Whether tools' results belong to it."""
        return bool(self.messages and self.messages[0].get("tool_calls"))


def is_message(message: object) -> bool:
    """Whether a message has the form that blocks are made of; the engine judges any other."""
    return isinstance(message, dict) and isinstance(message.get("tool_calls") or [], list)


def source_of(message: Message) -> str:
    """Which kind of block a message begins."""
    role = str(message.get("role"))
    if role == "assistant":
        return "tool" if message.get("tool_calls") else "assistant"
    return _SOURCES.get(role, "user")


def digest_of(message: Message) -> bytes:
    """Digest of what clients repeat of a message: no thoughts, no space at its ends."""
    calls = [
        [call.get("id"), *called(call)]
        for call in message.get("tool_calls") or ()
        if isinstance(call, dict)
    ]
    content = message.get("content")
    if isinstance(content, list) and all(_is_text(part) for part in content):
        content = "".join(part["text"] for part in content)
    if isinstance(content, str):
        is_answer = message.get("role") == "assistant"
        content = (_said_of(content) if is_answer else content).strip()
    said = [message.get("role"), content or "", calls, message.get("tool_call_id")]
    return hashlib.blake2b(orjson.dumps(said), digest_size=16).digest()


def without_thoughts(message: Message) -> Message:
    """A message as later turns have it; the very same, if it has none of the assistant's."""
    if message.get("role") != "assistant":
        return message
    content = message.get("content")
    thinks = isinstance(content, str) and _THOUGHTS_END in content
    if not thinks and not any(field in message for field in THOUGHTS):
        return message
    kept = {field: value for field, value in message.items() if field not in THOUGHTS}
    return kept | {"content": _said_of(content)} if isinstance(content, str) else kept


def called(call: Mapping[str, Any]) -> Sequence[str]:
    """The name of a called tool, and its arguments."""
    function = call.get("function")
    function = function if isinstance(function, dict) else {}
    return str(function.get("name") or ""), str(function.get("arguments") or "")


def _said_of(text: str) -> str:
    """An answer without the thoughts before it; templates may have opened them."""
    return _THOUGHT.sub("", text, count=1) if _THOUGHTS_END in text else text


def _texts(message: Message) -> Iterable[str]:
    content = message.get("content")
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        yield from (part["text"] for part in content if _is_text(part))
    for call in message.get("tool_calls") or ():
        if isinstance(call, dict):
            yield " ".join(called(call))


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)
