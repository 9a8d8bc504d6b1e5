"""Columns: properties of a table's rows, one array each, declared once."""

from __future__ import annotations

import mmap
from collections.abc import Generator, Iterator
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np
import numpy.typing as npt

# So many rows take long to copy: they get more room ahead of need, column by column, once less than
# this share of it is left. Both chosen.
_MANY_ROWS: Final = 1 << 17
_SPARE: Final = 1 / 16
_PART: Final = 1 << 20  # bytes of memory that are taken in one slice; chosen


class Column(NamedTuple):
    """How a column is declared.

    Attributes:
        dtype: Of its values.
        fill: The value of a fresh row.
        is_time: Whether it holds monotonic seconds: a snapshot stores those as ages.
        is_rare: Whether most graphs never write it: it takes no room before somebody does.
    """

    dtype: Any
    fill: Any
    is_time: bool
    is_rare: bool


def column(dtype: Any, fill: Any, *, time: bool = False, rare: bool = False) -> Any:
    """Declare a column in the body of a subclass of ``Columns``; its instances hold the array."""
    return Column(dtype, fill, time, rare)


class Columns:
    """Arrays of one length: the columns that subclasses declare with ``column``.

    A rare column is one value, seen as an array that cannot be written, until ``for_writing``
    makes it an array like the others.

    Args:
        capacity: Rows to make room for, all of them fresh.
    """

    _declared: ClassVar[dict[str, Column]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        own = {name: each for name, each in vars(cls).items() if isinstance(each, Column)}
        cls._declared = {**cls._declared, **own}

    def __init__(self, capacity: int) -> None:
        for name, each in self._declared.items():
            fresh = _unwritten if each.is_rare else _written
            setattr(self, name, fresh(each, capacity))

    @classmethod
    def times(cls) -> tuple[str, ...]:
        """The columns that hold monotonic seconds."""
        return tuple(name for name, each in cls._declared.items() if each.is_time)

    @property
    def columns_nbytes(self) -> int:
        """Bytes of all columns that take room, that for further rows included."""
        return sum(values.nbytes for values in self._arrays().values())

    def for_writing(self, name: str) -> npt.NDArray[Any]:
        """A column, which may be a rare one, as an array that can be written."""
        values: npt.NDArray[Any] = getattr(self, name)
        if not values.flags.writeable:
            values = _written(self._declared[name], len(values))
            setattr(self, name, values)
        return values

    def views(self, size: int) -> dict[str, npt.NDArray[Any]]:
        """Every declared column by name, cut to its first ``size`` rows."""
        return {name: getattr(self, name)[:size] for name in self._declared}

    def fill(self, columns: dict[str, npt.NDArray[Any]], size: int) -> None:
        """Set the first ``size`` rows to what ``views`` gave."""
        for name, each in self._declared.items():
            if not each.is_rare or (columns[name] != each.fill).any():
                self.for_writing(name)[:size] = columns[name]

    def refresh(self, rows: Any) -> None:
        """Make these rows (an index or a slice) fresh."""
        own = vars(self)
        for name, each in self._declared.items():
            values = own[name]
            if values.flags.writeable:
                values[rows] = each.fill

    def grow(self, capacity: int) -> None:
        """Make room for ``capacity`` rows; a new one must be made fresh before its use."""
        for _ in self.growing(capacity):
            pass

    def growing(self, capacity: int) -> Iterator[None]:
        """``grow``, one column at a time and the long ones in parts; the column that was declared
        first is the last."""
        for name, each in reversed(self._declared.items()):
            if getattr(self, name).flags.writeable:
                room = yield from taken_in_parts(getattr(self, name), capacity)
                setattr(self, name, refilled(room, getattr(self, name)))
            else:
                setattr(self, name, _unwritten(each, capacity))
            yield

    def growing_ahead(self, size: int) -> Iterator[None]:
        """Make more room, one column at a time, where ``size`` of many rows leave little; no row
        may be taken meanwhile."""
        capacity = len(getattr(self, next(iter(self._declared))))
        if capacity >= _MANY_ROWS and size > (1 - _SPARE) * capacity:
            yield from self.growing(more_than(capacity))

    def _arrays(self) -> dict[str, npt.NDArray[Any]]:
        """The columns that take room, by name."""
        arrays = {name: getattr(self, name) for name in self._declared}
        return {name: values for name, values in arrays.items() if values.flags.writeable}


def more_than(capacity: int) -> int:
    """Rows that a full table gets room for: an eighth more keeps the slack under the budget of
    bytes a block."""
    return capacity + capacity // 8


def grown(values: npt.NDArray[Any], capacity: int, fill: int = 0) -> npt.NDArray[Any]:
    """A copy with room for ``capacity`` rows along the last axis; ``fill`` where nothing was."""
    shape = (*values.shape[:-1], capacity)
    # Memory of zeros is taken only as it is written.
    copied = np.full(shape, fill, values.dtype) if fill else np.zeros(shape, values.dtype)
    return refilled(copied, values)


def refilled(room: npt.NDArray[Any], values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """``room``, with ``values`` in its first places along the last axis."""
    room[..., : values.shape[-1]] = values
    return room


def taken_in_parts(
    values: npt.NDArray[Any], capacity: int
) -> Generator[None, None, npt.NDArray[Any]]:
    """Zeros with room for ``capacity`` values like these, slice by slice.

    What takes long is that the system gives memory as it is written first, page by page: so pages
    are written here, and the copy that follows in one stroke is short. Whatever is written to
    ``values`` meanwhile is in that copy.
    """
    room = np.zeros((*values.shape[:-1], capacity), dtype=values.dtype)
    pages = room.reshape(-1).view(np.uint8)
    for start in range(0, len(pages), _PART):
        pages[start : start + _PART : mmap.PAGESIZE] = 0
        if start + _PART < len(pages):
            yield
    return room


def _written(declared: Column, capacity: int) -> npt.NDArray[Any]:
    return np.full(capacity, declared.fill, dtype=declared.dtype)


def _unwritten(declared: Column, capacity: int) -> npt.NDArray[Any]:
    return np.broadcast_to(np.array(declared.fill, dtype=declared.dtype), capacity)
