"""Columns: properties of a table's rows, one array each, declared once."""

from __future__ import annotations

import hashlib
import mmap
import secrets
import sys
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ..compiled import core
from ..types import NO_ROW, Rows

# Copying a table of this many rows takes long: it grows ahead of need, column by column, once less
# than this share of it is free. Both chosen.
_MANY_ROWS: Final = 1 << 17
_SPARE: Final = 1 / 16
_FEW_ROWS: Final = 1 << 14  # fewer rows are copied quickly; chosen
_NOTHING: Final[Mapping[str, bytes]] = MappingProxyType({})
_AHEAD: Final = 1 << 15  # rows whose memory is touched before they are used; chosen
_PART: Final = 1 << 20  # bytes of memory touched in one slice; chosen


class Column(NamedTuple):
    dtype: Any  # dtype of its values
    fill: Any  # the value of a fresh row
    is_time: bool  # whether it holds monotonic seconds, which a snapshot stores as ages
    is_rare: bool  # whether most graphs never write it; allocated at the first write


def column(dtype: Any, fill: Any, *, time: bool = False, rare: bool = False) -> Any:
    """Declare a column in the body of a subclass of ``Columns``; instances hold the array."""
    return Column(dtype, fill, time, rare)


class Columns:
    """Arrays of one length: the columns that subclasses declare with ``column``. A rare column is a
    read-only array that repeats one value, until ``for_writing`` makes it an ordinary array.
    """

    _declared: ClassVar[dict[str, Column]] = {}
    _touched = 0  # rows whose memory has been touched
    _room: tuple[list[npt.NDArray[Any]], list[bytes], dict[str, int]] | None = None  # of ``fresh``
    _filled: ClassVar[dict[str, bytes]] = {}  # the initial value of each column, as bytes

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        own = {name: each for name, each in vars(cls).items() if isinstance(each, Column)}
        cls._declared = {**cls._declared, **own}
        cls._filled = {
            name: np.array(each.fill, dtype=each.dtype).tobytes()
            for name, each in cls._declared.items()
        }

    def __init__(self, capacity: int) -> None:
        for name, each in self._declared.items():
            fresh = _unwritten if each.is_rare else _written
            setattr(self, name, fresh(each, capacity))

    @classmethod
    def times(cls) -> tuple[str, ...]:
        """Return the names of the columns that hold monotonic seconds."""
        return tuple(name for name, each in cls._declared.items() if each.is_time)

    @property
    def size(self) -> int:
        """Rows that may have been used: all that there is room for, unless a table counts them."""
        return len(getattr(self, next(iter(self._declared))))

    def columns_nbytes(self, size: int) -> int:
        """Return the bytes that the first ``size`` rows take in all columns; the system provides
        memory for further rows only when they are written.
        """
        return sum(values.itemsize * size for values in self._arrays().values())

    def for_writing(self, name: str) -> npt.NDArray[Any]:
        """Return a column as a writable array, even if it is rare."""
        values: npt.NDArray[Any] = getattr(self, name)
        if not values.flags.writeable:
            values = np.zeros(len(values), dtype=values.dtype)
            values[: self.size] = self._declared[name].fill
            setattr(self, name, values)
            self._room = None
        return values

    def views(self, size: int) -> dict[str, npt.NDArray[Any]]:
        return {name: getattr(self, name)[:size] for name in self._declared}

    def fill(self, columns: dict[str, npt.NDArray[Any]], size: int) -> None:
        """Set the first ``size`` rows to the result of ``views``."""
        for name, each in self._declared.items():
            if not each.is_rare or (columns[name] != each.fill).any():
                self.for_writing(name)[:size] = columns[name]

    def refresh(self, rows: Rows) -> None:
        """Reset these rows, int32 ``[n]``, to the columns' initial values."""
        core.refresh(*self.fresh(), rows, None)

    def fresh(
        self, own: Mapping[str, bytes] = _NOTHING
    ) -> tuple[list[npt.NDArray[Any]], list[bytes]]:
        """Return the columns that take memory, and each one's initial value, ``own``'s first."""
        if self._room is None:  # asked for with every batch of blocks that are new
            arrays = self._arrays()
            filled = [self._filled[name] for name in arrays]
            self._room = [*arrays.values()], filled, {name: at for at, name in enumerate(arrays)}
        columns, filled, places = self._room
        values = filled.copy()
        for name, value in own.items():
            values[places[name]] = value
        return columns.copy(), values

    def grow(self, capacity: int) -> None:
        """Make room for ``capacity`` rows; each new row must be reset before its use."""
        for _ in self.growing(capacity):
            pass

    def growing(self, capacity: int) -> Iterator[None]:
        """As ``grow``, a column or a part of one at a time; the first declared column is last."""
        for name, each in reversed(self._declared.items()):
            if getattr(self, name).flags.writeable:
                room = yield from taken_in_parts(getattr(self, name), capacity)
                setattr(self, name, refilled(room, getattr(self, name)))
            else:
                setattr(self, name, _unwritten(each, capacity))
            self._room = None
            yield

    def growing_ahead(self, size: int) -> Iterator[None]:
        """Make room, a column at a time, if many rows leave little; none may be added meanwhile."""
        capacity = len(getattr(self, next(iter(self._declared))))
        if capacity < _MANY_ROWS:
            return
        if size > (1 - _SPARE) * capacity:
            self._touched = size
            yield from self.growing(more_than(capacity))
        if size + _AHEAD > self._touched:
            # The system gives memory as it is written first, in large pages: not while events wait.
            ahead = slice(max(self._touched, size), size + 2 * _AHEAD)
            self._touched = ahead.stop
            for values in self._arrays().values():
                values[ahead].view(np.uint8)[:: mmap.PAGESIZE] = 0
                yield

    def _arrays(self) -> dict[str, npt.NDArray[Any]]:
        own = vars(self)
        return {name: own[name] for name in self._declared if own[name].flags.writeable}


def more_than(capacity: int) -> int:
    """Return how many rows a full table is enlarged to. Memory is used only when written, but
    copying happens under the graph's lock, so there is room for a million rows early on.
    """
    return (2 if capacity < _FEW_ROWS else 8) * capacity


def grown(values: npt.NDArray[Any], capacity: int) -> npt.NDArray[Any]:
    """Return a copy with room for ``capacity`` rows along the last axis, new ones zero."""
    return refilled(np.zeros((*values.shape[:-1], capacity), values.dtype), values)


def refilled(room: npt.NDArray[Any], values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return ``room`` with ``values`` in its first places along the last axis."""
    room[..., : values.shape[-1]] = values
    return room


def taken_in_parts(
    values: npt.NDArray[Any], capacity: int
) -> Generator[None, None, npt.NDArray[Any]]:
    """Allocate zeros with room for ``capacity`` values like these, in slices of work.

    The slow part is that the system provides memory page by page as it is first written. So the
    pages that ``values`` will fill are written here, and the copy that follows is short. It
    includes whatever is written to ``values`` meanwhile.
    """
    room = np.zeros((*values.shape[:-1], capacity), dtype=values.dtype)
    filled = values.shape[-1] * values.itemsize
    touched = 0
    for row in room.reshape(-1, capacity):
        pages = row.view(np.uint8)
        for start in range(0, filled, _PART):
            pages[start : min(start + _PART, filled) : mmap.PAGESIZE] = 0
            touched += min(_PART, filled - start)
            if touched >= _PART:
                touched = 0
                yield
    return room


def _written(declared: Column, capacity: int) -> npt.NDArray[Any]:
    fill, dtype = declared.fill, declared.dtype
    # Memory of zeros is taken only as it is written.
    return np.full(capacity, fill, dtype) if fill else np.zeros(capacity, dtype)


def _unwritten(declared: Column, capacity: int) -> npt.NDArray[Any]:
    return np.broadcast_to(np.array(declared.fill, dtype=declared.dtype), capacity)


class RowPool:
    """Assigns row numbers, returned ones first."""

    def __init__(self) -> None:
        self.size = 0  # rows below this were handed out at some time
        self._free: deque[Rows] = deque()  # as they came back

    @property
    def nbytes(self) -> int:
        return sum(rows.nbytes for rows in self._free)

    def take(self, count: int) -> Rows:
        """Return ``count`` unused rows, int32; the table makes room for ``size`` of them."""
        taken = list[Rows]()
        while count and self._free:
            rows = self._free.popleft()
            taken.append(rows[:count])
            if count < len(rows):
                self._free.appendleft(rows[count:])
            count -= len(taken[-1])
        if count or not taken:
            taken.append(np.arange(self.size, self.size + count, dtype=np.int32))
            self.size += count
        return taken[0] if len(taken) == 1 else np.concatenate(taken)

    def give_back(self, rows: Rows) -> None:
        if self._free and len(self._free[-1]) < _FEW_ROWS:
            rows = np.concatenate([self._free.pop(), rows])
        self._free.append(rows)

    def restore(self, size: int, free: Rows) -> None:
        """Restore a pool that had assigned ``size`` rows, ``free`` of which were returned."""
        self.size, self._free = size, deque([free])


def distinct(rows: Rows) -> Rows:
    """Return the rows in ascending order, each once, without ``NO_ROW``."""
    rows = np.sort(rows)
    return np.asarray(rows[np.diff(rows, prepend=NO_ROW) != 0])


class Interner:
    """Gives each distinct string a small id; ids are never reused.

    Beyond ``limit`` distinct strings, all new ones share the id ``NO_ROW``, so that a caller who
    keeps inventing names cannot make the table grow without bound.
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
        return list(self._names)

    def intern(self, name: str) -> int:
        """Return the id of ``name``, a new one if needed; ``NO_ROW`` if the table is full."""
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
        """Fill an empty table with these names and ids, beyond any limit: columns hold them."""
        self._names = list(names)
        self._ids = {name: number for number, name in enumerate(self._names)}

    def find(self, name: str) -> int:
        return self._ids.get(name, NO_ROW)

    def name(self, number: int) -> str | None:
        """Return the string with this id; None for ``NO_ROW``."""
        return None if number == NO_ROW else self._names[number]


class TenantNames(Interner):
    """Tenants by number. Beyond the limit names are not kept, but tenants are still told apart:
    each gets an id below ``NO_ROW``, a keyed hash that a caller cannot choose.
    """

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self._key = secrets.token_bytes(16)

    def intern(self, name: str) -> int:
        """Return the id of ``name``; a hash of it if the table is full."""
        number = super().intern(name)
        return self._hashed(name) if number == NO_ROW else number

    def find(self, name: str) -> int:
        """Return the id that ``intern`` gives, or would give if the table were full."""
        number = super().find(name)
        return self._hashed(name) if number == NO_ROW else number

    def name(self, number: int) -> str | None:
        """Return the name; for a tenant whose name was not kept, a text that identifies it."""
        return f"unnamed-{-number:016x}" if number < NO_ROW else super().name(number)

    def _hashed(self, name: str) -> int:
        digest = hashlib.blake2b(
            name.encode("utf-8", "surrogatepass"), digest_size=8, key=self._key
        ).digest()
        return NO_ROW - 1 - (int.from_bytes(digest, "big") >> 2)
