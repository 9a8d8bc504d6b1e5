"""Strings by number, so that a column can hold a name in 4 bytes."""

from __future__ import annotations

import sys

from .types import NO_ROW


class Interner:
    """Gives each distinct string a small id; ids are never reused.

    Past ``limit`` distinct strings, further new ones share the id ``NO_ROW``: a caller that
    invents names without end must not grow us without end.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._ids: dict[str, int] = {}
        self._names: list[str] = []
        self.refused = 0

    def __len__(self) -> int:
        return len(self._names)

    @property
    def nbytes(self) -> int:
        strings = sum(map(sys.getsizeof, self._names))
        return sys.getsizeof(self._ids) + sys.getsizeof(self._names) + strings

    @property
    def names(self) -> list[str]:
        """All strings, by id."""
        return list(self._names)

    def intern(self, name: str) -> int:
        """The id of ``name``, new if need be; ``NO_ROW`` when the table is full."""
        found = self._ids.get(name)
        if found is not None:
            return found
        if len(self._names) >= self._limit:
            self.refused += 1
            return NO_ROW
        self._ids[name] = len(self._names)
        self._names.append(name)
        return len(self._names) - 1

    def find(self, name: str) -> int:
        """The id of ``name``, ``NO_ROW`` if it has none."""
        return self._ids.get(name, NO_ROW)

    def name(self, number: int) -> str | None:
        """The string with this id; None for ``NO_ROW``."""
        return None if number == NO_ROW else self._names[number]
