"""Columns: properties of a table's rows, one array each, declared once."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt


class Column(NamedTuple):
    """The declaration of a column.

    Attributes:
        dtype: The dtype of its values.
        fill: The value of a fresh row.
        is_time: Whether it holds monotonic seconds: a snapshot stores those as ages.
    """

    dtype: Any
    fill: Any
    is_time: bool


def column(dtype: Any, fill: Any, *, time: bool = False) -> Any:
    """Declare a column in the body of a subclass of ``Columns``; its instances hold the array."""
    return Column(dtype, fill, time)


class Columns:
    """Arrays of one length: the columns that subclasses declare with ``column``.

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
            setattr(self, name, np.full(capacity, each.fill, dtype=each.dtype))

    @classmethod
    def times(cls) -> tuple[str, ...]:
        """The columns that hold monotonic seconds."""
        return tuple(name for name, each in cls._declared.items() if each.is_time)

    @property
    def columns_nbytes(self) -> int:
        """Bytes of all declared columns, room for further rows included."""
        return sum(getattr(self, name).nbytes for name in self._declared)

    def views(self, size: int) -> dict[str, npt.NDArray[Any]]:
        """Every declared column by name, cut to its first ``size`` rows."""
        return {name: getattr(self, name)[:size] for name in self._declared}

    def fill(self, columns: dict[str, npt.NDArray[Any]], size: int) -> None:
        """Set the first ``size`` rows to what ``views`` gave."""
        for name in self._declared:
            getattr(self, name)[:size] = columns[name]

    def refresh(self, rows: Any) -> None:
        """Make these rows (an index or a slice) fresh."""
        for name, each in self._declared.items():
            getattr(self, name)[rows] = each.fill

    def grow(self, capacity: int) -> None:
        """Make room for ``capacity`` rows; a new one must be made fresh before its use."""
        for name in self._declared:
            setattr(self, name, grown(getattr(self, name), capacity))


def grown(values: npt.NDArray[Any], capacity: int) -> npt.NDArray[Any]:
    """A copy with room for ``capacity`` rows along the last axis; new rows are zero."""
    copied = np.zeros((*values.shape[:-1], capacity), dtype=values.dtype)
    copied[..., : values.shape[-1]] = values
    return copied
