"""Numbers for strings, so that a column can hold a name in 4 bytes."""

from __future__ import annotations

import hashlib
import secrets
import sys
from collections.abc import Iterable

from ..types import NO_ROW


class Interner:
    """Gives each distinct string a small id; ids are never reused.

    Past ``limit`` distinct strings, all new ones share the id ``NO_ROW``: a caller that invents
    names without end must not make the table grow without end.
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

    def restore(self, names: Iterable[str]) -> None:
        """Fill an empty table with the names of another, by their ids, whatever the limit is now:
        columns hold the ids."""
        self._names = list(names)
        self._ids = {name: number for number, name in enumerate(self._names)}

    def find(self, name: str) -> int:
        """The id of ``name``, ``NO_ROW`` if it has none."""
        return self._ids.get(name, NO_ROW)

    def name(self, number: int) -> str | None:
        """The string with this id; None for ``NO_ROW``."""
        return None if number == NO_ROW else self._names[number]


class TenantNames(Interner):
    """Tenants by number. Past the limit names are not kept, but tenants are still told apart: each
    gets an id below ``NO_ROW``, a keyed hash that a caller cannot choose."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self._key = secrets.token_bytes(16)

    def intern(self, name: str) -> int:
        """The id of ``name``; a hash of it where the table is full."""
        number = super().intern(name)
        return self._hashed(name) if number == NO_ROW else number

    def find(self, name: str) -> int:
        """The id that ``intern`` gives or would give once the table is full."""
        number = super().find(name)
        return self._hashed(name) if number == NO_ROW else number

    def name(self, number: int) -> str | None:
        """The name; for a tenant whose name was not kept, a text that tells it from others."""
        return f"unnamed-{-number:016x}" if number < NO_ROW else super().name(number)

    def _hashed(self, name: str) -> int:
        digest = hashlib.blake2b(
            name.encode("utf-8", "surrogatepass"), digest_size=8, key=self._key
        ).digest()
        return NO_ROW - 1 - (int.from_bytes(digest, "big") >> 2)
