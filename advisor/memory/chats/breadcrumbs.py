"""The line that names what has left a prompt."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from .chat_blocks import Message
from .chat_session import ChatSession

_MOST: Final = 32  # names in a line; chosen: it reminds, and is no list
_NAME: Final = re.compile(r"((?:file|tool):)?(.*?)(#\d+)?", re.DOTALL)  # ours: kind, and number
_ODD: Final = re.compile(r"[^\w./-]")


def breadcrumb(chat: ChatSession, characters: int) -> str:
    """One line that names what has left, the newest last; empty if nothing has.

    Args:
        characters: Of a line that names blocks; where none fits, it says how many have left.
    """
    names = [block.name for block in chat.away]
    if not names:
        return ""
    lines = (_line(names, shown) for shown in range(min(len(names), _MOST), 0, -1))
    return next((line for line in lines if len(line) <= characters), _line(names, 0))


def with_line(messages: Sequence[Message], line: str) -> list[Message]:
    """Messages with a line before what the last one says; the same, if that is no text."""
    said = messages[-1].get("content") if line else None
    if not isinstance(said, str):
        return list(messages)
    return [*messages[:-1], messages[-1] | {"content": f"{line}\n\n{said}"}]


def _line(names: Sequence[str], shown: int) -> str:
    """The line that names the newest blocks, and counts the older ones."""
    older = len(names) - shown
    parts = [f"{older} older"] if older else []
    return f"[left out: {', '.join([*parts, *map(_plain, names[older:])])}]"


def _plain(name: str) -> str:
    """A block's name without what could end the line, or speak for somebody: most of a name is a
    tool's or a model's words, and the line stands in what the user says."""
    found = _NAME.fullmatch(name)
    assert found is not None, "it takes any text"
    kind, said, number = found.groups()
    return f"{kind or ''}{_ODD.sub(_escaped, said)}{number or ''}"


def _escaped(odd: re.Match[str]) -> str:
    """As in a URL."""
    return "".join(f"%{byte:02X}" for byte in odd[0].encode(errors="replace"))
