"""What a tool call looks like: what stands around its tool's name, and that it runs to its end."""

from __future__ import annotations

import re
from collections import deque
from itertools import islice
from typing import Final

_NAME: Final = r"(?P<name>\w[\w.\-/]{0,63})"
"""What counts as a tool's name; anything else stays in the engine."""
_PIECES: Final = re.compile(r"\w+|[^\w\s]")
_STRINGS: Final = re.compile(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'', re.DOTALL)
_BARE: Final = re.compile(r"[^\s,;]")


class CallShape:
    """Finds the name of a tool between the texts that stand around names.

    Args:
        before, after: Those texts; white space may differ in them.
    """

    def __init__(self, before: str, after: str) -> None:
        ends = r"\s" if after.isspace() else r"\s*" + _loosely(after)
        self._pattern = re.compile(rf"{_loosely(before)}\s*{_NAME}{ends}")

    def at_start(self, text: str) -> str | None:
        """The name with which ``text`` begins; None if it begins otherwise."""
        found = self._pattern.match(text.lstrip())
        return found["name"] if found else None

    def search(self, text: str, last: bool = False) -> str | None:
        """The first name in ``text``, or the last one."""
        names = (found["name"] for found in self._pattern.finditer(text))
        found = deque(names, maxlen=1) if last else [*islice(names, 1)]
        return found[0] if found else None


def is_one_expression(text: str) -> bool:
    """Whether nothing stands in ``text`` behind its first bracket that is in no bracket."""
    depth, opened = 0, False
    for found in _BARE.finditer(_STRINGS.sub("", text)):
        mark = found.group()
        if mark in "[({":
            depth, opened = depth + 1, True
        elif mark in "])}":
            depth -= 1
        elif opened and not depth:
            return False
    return opened and not depth


def _loosely(text: str) -> str:
    """A pattern of ``text`` in which white space may differ."""
    return r"\s*".join(map(re.escape, _PIECES.findall(text)))
