"""``Block``: messages that leave a prompt, and come back to it, together.

A tool's results stay with the call that they answer, since engines refuse one without the other.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec
import orjson

Message = dict[str, Any]

_SOURCES: Final = {"system": "system", "developer": "system", "tool": "tool", "function": "tool"}
_FILES: Final = ("path", "file_path", "filename", "file")  # of a tool's arguments: what it is about
_THOUGHT: Final = re.compile(r"\A(?:\s*<think>)?(?:(?!<think>).)*?</think>\s*", re.DOTALL)
_THOUGHTS: Final = ("reasoning_content", "reasoning")
LONGEST_NAME: Final = 128  # characters


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
    turn: int
    place: int | None
    tokens: int = 0
    tags: dict[str, Any] = {}

    @property
    def text(self) -> str:
        """What its messages say, with the names and arguments of called tools."""
        return "\n".join(part for each in self.messages for part in _texts(each))

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


def source_of(message: Message) -> str:
    """Which kind of block a message begins."""
    role = str(message.get("role"))
    if role == "assistant":
        return "tool" if message.get("tool_calls") else "assistant"
    return _SOURCES.get(role, "user")


def name_of(message: Message, named: Counter[str]) -> str:
    """A name for the block that a message begins; counts it in ``named``."""
    stem = source_of(message)
    if stem == "tool":
        stem = _about(message)
    number = named[stem]
    named[stem] += 1
    return f"{stem[:LONGEST_NAME]}#{number}"


def digest_of(message: Message) -> bytes:
    """Digest of what clients repeat of a message: no thoughts, no space at its ends."""
    calls = [
        [call.get("id"), *_called(call)]
        for call in message.get("tool_calls") or ()
        if isinstance(call, dict)
    ]
    content = message.get("content")
    if isinstance(content, list) and all(_is_text(part) for part in content):
        content = "".join(part["text"] for part in content)
    if isinstance(content, str):
        is_answer = message.get("role") == "assistant"
        content = (without_thought(content) if is_answer else content).strip()
    said = [message.get("role"), content or "", calls, message.get("tool_call_id")]
    return hashlib.blake2b(orjson.dumps(said), digest_size=16).digest()


def as_kept(message: Mapping[str, Any], strip_think: bool) -> Message:
    """A message as later prompts have it."""
    kept = dict(message)
    if strip_think and kept.get("role") == "assistant":
        for field in _THOUGHTS:
            kept.pop(field, None)
        if isinstance(content := kept.get("content"), str):
            kept["content"] = without_thought(content)
    return kept


def without_thought(text: str) -> str:
    """An answer without the thoughts before it; templates may have opened them."""
    return _THOUGHT.sub("", text, count=1)


def text_of(messages: Iterable[Message]) -> str:
    """All text of some messages."""
    return "\n".join(part for each in messages for part in _texts(each))


def _texts(message: Message) -> Iterable[str]:
    content = message.get("content")
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        yield from (part["text"] for part in content if _is_text(part))
    for call in message.get("tool_calls") or ():
        if isinstance(call, dict):
            yield " ".join(_called(call))


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)


def _called(call: Mapping[str, Any]) -> Sequence[str]:
    function = call.get("function")
    function = function if isinstance(function, dict) else {}
    return str(function.get("name") or ""), str(function.get("arguments") or "")


def _about(message: Message) -> str:
    """``file:PATH`` where the first called tool is given a file, and else ``tool:NAME``."""
    calls = message.get("tool_calls") or [{}]
    name, arguments = _called(calls[0] if isinstance(calls[0], dict) else {})
    try:
        given = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        given = None
    for field in _FILES if isinstance(given, dict) else ():
        if isinstance(path := given.get(field), str) and path:
            return f"file:{path}"
    return f"tool:{name or message.get('name') or 'unnamed'}"
