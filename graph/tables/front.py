"""``Front``: a copy of some rows of a block table, to be ranked while the table changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..compiled import core
from ..types import Keys, Rows, Tier
from .blocks import BlockTable, EdgeSums, Mask, Places, Selection, Tiers, places_of
from .columns import RowPool

PART: Final = 1 << 16
"""Rows copied while the graph's lock is held once: a millisecond or less; chosen."""
# None of our rankings reads other columns. A user's own policy may, but then reads the table
# itself.
_ALIKE: Final = (
    "layer", "flags", "stated", "raised_by", "importance", "session", "created", "last_attended",
    "last_hit", "hit_count", "walkers", "shared_children", "children_walks", "pinned_until",
)  # fmt: skip
_NOTHING: Final = np.zeros(0, dtype=np.bool_)
_COPIED: Final = ("parent", "depth", "children", *_ALIKE)


class Front(BlockTable):
    """A read-only copy of some rows of another block table, or of runs of them, with the columns
    that rankings use.

    Parents are given by their rows in the other table. Blocks may be added and removed there
    between two parts of the copy, so each row is complete as of the moment when it was copied. In a
    run, each block is the parent and only parent of the next, and all are equal but for their
    depth; the row here is that of the first block.

    Args:
        source: The other table.
        engine: The residency column of the engine whose tiers are copied.
        rows: int32 ``[n]``, ascending, no row twice.
        alone: Which of some rows are never combined with others, bool ``[n]``; consecutive, equal
            blocks of all others are combined into one row. None: no blocks are.
    """

    def __init__(
        self, source: BlockTable, engine: int, rows: Rows, alone: Callable[[Rows], Mask] | None
    ) -> None:
        self._source, self._engine, self._wanted, self._alone = source, engine, rows, alone
        self._copies: dict[str, npt.NDArray[Any]] = {}  # as far as they were taken, by name
        self._size = self._most = 0  # of them: so far, and at most
        self._rows = RowPool()
        self.had_copies = False
        self.sums = {}
        # int64 ``[size]``: blocks of each run; None: there are no runs.
        self.lengths: Places | None = None

    def take(self, start: int) -> int:
        """Copy ``PART`` rows starting at index ``start``, or up to half as many more if they are
        the last ones; the caller holds the graph's lock. Returns the start of the next part.
        """
        end = start + PART if len(self._wanted) - start > PART * 3 // 2 else len(self._wanted)
        source, rows = self._source, self._wanted[start:end]
        columns = self._columns()
        self.had_copies |= source.had_copies
        copies = np.bitwise_or.reduce(source.tiers[:, rows], axis=0) if source.had_copies else None
        if self._alone is not None:
            alike = [each for name, each in columns.items() if name not in _COPIED[:3]]
            begins, starts = self._breaks(rows, copies), np.empty(len(rows), dtype=np.int64)
            found = core.runs(
                source.parent, source.depth, source.children, rows, alike, begins, starts
            )
            starts = starts[:found]
            rows, copies = rows[starts], None if copies is None else copies[starts]
            starts += start
        columns["keys"] = source.keys
        self._most = len(rows) if end - start == len(self._wanted) else len(self._wanted)
        if self._alone is not None:
            self._put("starts", starts)
        self._put("there", rows)
        if copies is not None:
            self._put("copies", copies)
        room = [self._room_of(name, each.dtype) for name, each in columns.items()]
        core.gather(list(columns.values()), rows, room, self._size)
        self._size += len(rows)
        return end

    def _breaks(self, rows: Rows, copies: Tiers | None) -> Mask:
        """Which rows begin a run whatever their columns hold, bool ``[n]``; empty if none does."""
        alone = _NOTHING if self._alone is None else self._alone(rows)
        if not len(alone) and copies is None:
            return alone
        begins = np.zeros(len(rows), dtype=np.bool_)
        if len(alone):  # what goes on behind one of them differs from it, or is one itself
            begins |= alone
        if copies is not None:
            begins[1:] |= copies[1:] != copies[:-1]
        return begins

    def _columns(self) -> dict[str, npt.NDArray[Any]]:
        """What is copied of the other table, by name."""
        own = vars(self._source)
        columns = {name: own[name] for name in _COPIED if own[name].flags.writeable}
        if self._engine >= 0:
            columns["own"] = self._source.tiers[self._engine]
        for kind, sums in self._source.sums.items():
            columns[f"{kind:d} degree"], columns[f"{kind:d} weight"] = sums.degree, sums.weight
        return columns

    def _put(self, name: str, values: npt.NDArray[Any]) -> None:
        room = self._room_of(name, values.dtype)
        room[self._size : self._size + len(values)] = values

    def _room_of(self, name: str, dtype: Any) -> npt.NDArray[Any]:
        """Room for a column. One that was made between two parts has its own value before."""
        room = self._copies.get(name)
        if room is None:
            room = self._copies[name] = np.empty(self._most, dtype=dtype)
            room[: self._size] = self._declared[name].fill if name in self._declared else 0
        return room

    def close(self) -> None:
        """Trim the columns to the rows copied; no more parts follow."""
        found = {name: each[: self._size] for name, each in self._copies.items()}
        self._copies = {}
        self._set(found)

    def _set(self, found: dict[str, npt.NDArray[Any]]) -> None:
        count = len(found["there"])
        self._found, self._rows.size = found, count
        self._every = np.arange(count, dtype=np.int32)
        self._none = np.zeros(count, dtype=np.uint8)
        for name in _COPIED:
            each = found.get(name)
            setattr(self, name, self._unwritten(name, count) if each is None else each)
        for kind in self._source.sums:
            if f"{kind:d} degree" in found:
                sums = self.sums[kind] = EdgeSums.__new__(EdgeSums)
                sums.degree, sums.weight = found[f"{kind:d} degree"], found[f"{kind:d} weight"]
        if self._alone is not None:
            self.starts = found["starts"]
            self.lengths = np.empty_like(self.starts)
            self.lengths[:-1] = self.starts[1:] - self.starts[:-1]
            self.lengths[-1:] = len(self._wanted) - self.starts[-1:]

    def _unwritten(self, name: str, count: int) -> npt.NDArray[Any]:
        """A rare column that nobody had written when the rows were copied: one value for all."""
        column: npt.NDArray[Any] = getattr(self._source, name)
        if column.flags.writeable:  # it was written since
            return np.broadcast_to(self._declared[name].fill, count)
        return column[:count]

    def cut(self, deepest: Rows) -> None:
        """Split runs that extend below these depths, int32 ``[size]``, into two."""
        assert self.lengths is not None
        ahead = deepest.astype(np.int64) - self.depth + 1  # blocks of the first part
        at = ((ahead > 0) & (ahead < self.lengths)).nonzero()[0]
        if not len(at):
            return
        ahead = ahead[at]
        both = np.insert(np.arange(self.size), at + 1, at)
        found = {name: each[both] for name, each in self._found.items()}
        new = at + 1 + np.arange(len(at))
        found["starts"][new] += ahead
        found["there"][new] += ahead.astype(np.int32)
        found["depth"][new] += ahead.astype(np.int32)
        found["parent"][new] = found["there"][new] - 1
        self._set(found)

    @property
    def keys(self) -> Keys:
        keys: Keys = self._found["keys"]
        return keys

    @property
    def firsts(self) -> Rows:
        """int32 ``[size]``: each row's number in the other table."""
        firsts: Rows = self._found["there"]
        return firsts

    def keys_of_runs(
        self, runs: Places, offsets: Places, salt: np.uint64, marks: Mask
    ) -> tuple[Keys, Keys]:
        """Return the engines' keys of blocks in runs, given by each block's offset in its run,
        uint64 ``[≤ n]``; and those of them whose run is marked in ``marks``, bool ``[size]``. A
        block that has left since has none. Call it with the graph's lock.
        """
        source, keys = self._source, np.empty((2, len(runs)), dtype=np.uint64)
        found, marked = core.keys_of_runs(
            self._found["there"], self.created, runs, offsets, source.created, source.keys,
            int(salt), marks, keys[0], keys[1],
        )  # fmt: skip
        return keys[0, :found], keys[1, :marked]

    def holding(self, engine: int, tiers: int = int(Tier.HOT)) -> Selection:
        held = (self.own_tiers(engine, self.every) & tiers) != 0
        return Selection(self, self._every if held.all() else self._every[held])

    @property
    def every(self) -> Selection:
        """A selection of all rows."""
        return Selection(self, self._every)

    def own_tiers(self, engine: int, picked: Selection) -> Tiers:
        return picked.of(self._found.get("own", self._none))

    def copies(self, picked: Selection) -> Tiers:
        return picked.of(self._found.get("copies", self._none))

    def parents(self, rows: Rows) -> Places:
        last: Rows = self._found["there"]
        if self.lengths is not None:
            last = (last + self.lengths - 1).astype(np.int32)
        if len(rows) == self.size:
            return places_of(last, self.parent)
        return places_of(last[rows], self.parent[rows])
