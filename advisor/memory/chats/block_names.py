"""``BlockNames``: names for a chat's blocks, by which people tell one from another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import orjson

from .chat_blocks import Message, called, source_of

LONGEST_NAME: Final = 128  # characters, before a number
_FILES: Final = ("path", "file_path", "filename", "file")  # of a tool's arguments: what it is about


class BlockNames:
    """Gives names that no other block of a chat has.

    Args:
        taken: Names of its blocks.
    """

    def __init__(self, taken: Iterable[str]) -> None:
        self._taken = set(taken)
        self._highest: dict[str, int] = {}
        for name in self._taken:
            self._note(name)

    def of(self, message: Message) -> str:
        """A name for the block that a message begins: its kind, and a number from 0."""
        source = source_of(message)
        return self._numbered(_about(message) if source == "tool" else source)

    def given(self, name: str) -> str:
        """The name that a client gives, with a number behind it where another block has it."""
        name = name[:LONGEST_NAME]
        if name in self._taken:
            return self._numbered(name)
        self._take(name)
        return name

    def _numbered(self, stem: str) -> str:
        """A stem with the number behind the highest that is taken."""
        stem = stem[:LONGEST_NAME]
        name = f"{stem}#{self._highest.get(stem, -1) + 1}"
        self._take(name)
        return name

    def _take(self, name: str) -> None:
        self._taken.add(name)
        self._note(name)

    def _note(self, name: str) -> None:
        stem, _, number = name.rpartition("#")
        if number.isascii() and number.isdigit():
            self._highest[stem] = max(self._highest.get(stem, -1), int(number))


def _about(message: Message) -> str:
    """``file:PATH`` where the first called tool is given a file, and else ``tool:NAME``."""
    calls: Sequence[object] = message.get("tool_calls") or [{}]
    name, arguments = called(calls[0] if isinstance(calls[0], dict) else {})
    try:
        given = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        given = None
    for field in _FILES if isinstance(given, dict) else ():
        if isinstance(path := given.get(field), str) and path:
            return f"file:{path}"
    return f"tool:{name or message.get('name') or 'unnamed'}"
