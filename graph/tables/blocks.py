"""The block table: one row per block, one array per property."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from ..columns.columns import more_than, refilled, taken_in_parts
from ..columns.consecutive import Counts64, follow_chains
from ..columns.hash_index import HashIndex
from ..columns.row_pool import RowPool
from ..types import NO_ROW, BlockFlag, EdgeType, Keys, Rows, Tier
from .block_columns import BlockColumns, EdgeSums, Mask, Times
from .identity import NO_SALT

_T = TypeVar("_T", bound=np.generic)
Places = npt.NDArray[np.intp]

_INITIAL_ROWS: Final = 1024  # chosen
_COPIES: Final = int(Tier.WARM | Tier.COLD)
_PART: Final = 1 << 17  # rows that one slice of long work looks at; chosen


class BlockTable(BlockColumns):
    """Blocks by row. Rows are reused; a row in use is one that ``alive`` marks.

    Attributes (arrays of length ``capacity``, beside ``BlockColumns``):
        keys: uint64, the engine's block hash with the model's salt in it; see ``wire_keys``.
        tiers: uint8 ``[engine columns, capacity]``, types.Tier bits of each engine.
        sums: By type, for types that ever had a stored edge.
        had_copies: Whether a colder tier of any engine ever held a block.
    """

    def __init__(self) -> None:
        super().__init__(_INITIAL_ROWS)
        self.alive[:] = False
        self._rows = RowPool()
        self._index = HashIndex(_INITIAL_ROWS)
        self.tiers = np.zeros((1, _INITIAL_ROWS), dtype=np.uint8)
        self.sums: dict[EdgeType, EdgeSums] = {}
        self.had_copies = False

    def __len__(self) -> int:
        return len(self._index)

    @property
    def size(self) -> int:
        """Rows below this were used at some time."""
        return self._rows.size

    @property
    def keys(self) -> Keys:
        return self._index.keys

    @property
    def nbytes(self) -> int:
        sums = sum(each.columns_nbytes for each in self.sums.values())
        return (
            self.columns_nbytes + self.tiers.nbytes + sums + self._index.nbytes + self._rows.nbytes
        )

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """Every column by name, cut to the rows ever used; views, for reading."""
        size = self.size
        return {"keys": self.keys[:size], "tiers": self.tiers[:, :size], **self.views(size)}

    def load_columns(self, columns: dict[str, npt.NDArray[Any]]) -> None:
        """Replace an empty table's content by what ``columns()`` gave."""
        size = len(columns["alive"])
        self._reserve(size)
        self._rows.restore(size, np.flatnonzero(~columns["alive"]).astype(np.int32))
        self.fill(columns, size)
        self.reserve_engines(len(columns["tiers"]))
        self.tiers[: len(columns["tiers"]), :size] = columns["tiers"]
        self.had_copies = bool((columns["tiers"] & _COPIES).any())
        live = self.live_rows()
        self._index.insert(columns["keys"][live], live)

    def live_rows(self) -> Rows:
        """int32: the rows in use, ascending."""
        return np.flatnonzero(self.alive[: self.size]).astype(np.int32)

    def parts(self) -> Iterator[slice]:
        """All rows ever used, in parts for one slice each; those that come meanwhile, too."""
        start = 0
        while start < self.size:
            end = min(start + _PART, self.size)
            yield slice(start, end)
            start = end

    def find(self, keys: Keys, salt: np.uint64 = NO_SALT) -> Rows:
        """int32 ``[n]``: the row of each of a model's keys, ``NO_ROW`` where it is unknown."""
        keys, rows = _salted(keys, salt), np.empty(len(keys), dtype=np.int32)
        left = follow_chains(self._index, self.alive, keys, rows)
        rows[left] = self._index.find(keys[left])
        return rows

    def wire_keys(self, rows: Rows | slice | int) -> Keys:
        """uint64 ``[n]``: how engines call these blocks."""
        return self.keys[rows] ^ self.salt[rows]

    def ensure(
        self, keys: Keys, now: float, salt: np.uint64 = NO_SALT,
        counts: Counts64 | None = None, guessed: Rows | None = None,
    ) -> tuple[Rows, Mask]:  # fmt: skip
        """Rows of ``keys`` (repeats allowed), created where unknown, in the order of ``keys``.

        Args:
            keys: uint64 ``[n]``, as the engine calls them.
            now: Monotonic seconds.
            salt: The salt of the engine's model.
            counts: int64 ``[chains]``: how many of them each chain has, if they are of chains.
            guessed: int32 ``[n]``: where those of chains may be; see ``KnownChains``.

        Returns:
            rows int32 ``[n]``, and a bool ``[n]`` that is true where the row is new.
        """
        keys, rows = _salted(keys, salt), np.empty(len(keys), dtype=np.int32)
        left = follow_chains(self._index, self.alive, keys, rows, counts, guessed)
        new = np.zeros(len(keys), dtype=np.bool_)
        rows[left], new[left] = self._index.ensure(keys[left], self._take)
        if new.any():
            self._begin(rows[new], salt, now)
        return rows, new

    def release(self, rows: Rows) -> None:
        """Take rows out of use; the caller has removed their edges."""
        self._index.remove(rows)
        self.alive[rows] = False
        self._rows.give_back(rows)

    def tidying(self) -> Iterator[None]:
        """Make more room in a large table ahead of need; no block may come or go meanwhile."""
        yield from self._index.tidying()
        yield from self.growing_ahead(self.size)

    def forget_sessions(self, rows: Rows) -> None:
        """Remove these session rows, which are about to be reused, from all blocks."""
        highest = max(int(each.max()) for each in (rows, self.session, self.raised_by))
        gone = np.zeros(highest + 2, dtype=np.bool_)  # the last one stands for NO_ROW
        gone[rows] = True
        for sessions in (self.session[: self.size], self.raised_by[: self.size]):
            sessions[gone[sessions]] = NO_ROW

    def reserve_engines(self, columns: int) -> None:
        """Make room for the residency of so many engines."""
        missing = columns - len(self.tiers)
        if missing > 0:
            self.tiers = np.pad(self.tiers, ((0, missing), (0, 0)))

    def resident(self, engine: int) -> Mask:
        """bool ``[size]``: the blocks in this engine's pool."""
        return self.has(engine, np.s_[: self.size], Tier.HOT)

    def last_used(self, rows: Rows) -> Times:
        """float64 ``[n]``: the last time that each of these rows was read."""
        return np.maximum(self.last_attended[rows], self.last_hit[rows])

    def mark(self, engine: int, rows: Rows | slice, tier: Tier) -> None:
        """Note that this engine holds these blocks in this tier."""
        self.tiers[engine, rows] |= np.uint8(int(tier))
        self.had_copies |= bool(int(tier) & _COPIES)

    def unmark(self, engine: int, rows: Rows | slice, tier: Tier) -> None:
        """Note that this engine no longer holds these blocks in this tier."""
        self.tiers[engine, rows] &= ~np.uint8(int(tier))

    def has(self, engine: int, rows: Rows | slice, tier: Tier) -> Mask:
        """bool ``[n]``: which of these blocks the engine holds in any of the tiers in ``tier``."""
        return np.asarray((self.tiers[engine, rows] & int(tier)) != 0)

    def flag(self, rows: Rows | slice, flag: BlockFlag) -> None:
        """Set a flag of these blocks."""
        self.flags[rows] |= np.uint8(int(flag))

    def unflag(self, rows: Rows | slice, flag: BlockFlag) -> None:
        """Clear a flag of these blocks."""
        self.flags[rows] &= ~np.uint8(int(flag))

    def flagged(self, rows: Rows | slice, flag: BlockFlag) -> Mask:
        """bool ``[n]``: which of these blocks carry a flag."""
        return np.asarray((self.flags[rows] & int(flag)) != 0)

    def sums_of(self, kind: EdgeType) -> EdgeSums:
        """The sums of a type's stored edges at each block; their columns are made at the first
        call."""
        if kind not in self.sums:
            self.sums[kind] = EdgeSums(len(self.alive))
        return self.sums[kind]

    def pick(self, mask: Mask) -> Selection:
        """The rows where ``mask``, bool ``[size]``, is true."""
        return Selection(self, np.flatnonzero(mask).astype(np.int32))

    def _take(self, count: int) -> Rows:
        """Take rows for so many new blocks, in order; there is room for them."""
        rows = self._rows.take(count)
        self._reserve(self.size)
        return rows

    def _begin(self, rows: Rows, salt: np.uint64, now: float) -> None:
        """Reset rows (repeats allowed), and take them into use."""
        at = as_slice(rows)
        self.refresh(at)
        self.tiers[:, at] = 0
        for each in self.sums.values():
            each.refresh(at)
        self.created[at] = self.last_attended[at] = now
        if salt:
            self.salt[at] = salt

    def _reserve(self, rows: int) -> None:
        if rows > len(self.alive):
            self.grow(max(rows, more_than(len(self.alive))))

    def growing(self, capacity: int) -> Iterator[None]:
        yield from self._index.growing(capacity)
        room = yield from taken_in_parts(self.tiers, capacity)
        self.tiers = refilled(room, self.tiers)
        yield
        for each in self.sums.values():
            yield from each.growing(capacity)
        yield from super().growing(capacity)


class Selection:
    """A selection of rows. Work done on it scales with the selection, not with the table.

    Most rows are blocks that left long ago and are remembered for their history.

    Args:
        blocks: The table.
        rows: int32 ``[n]``, ascending, no row twice.
    """

    def __init__(self, blocks: BlockTable, rows: Rows) -> None:
        self._blocks = blocks
        self.rows = rows
        self._all = len(rows) == blocks.size

    def __len__(self) -> int:
        return len(self.rows)

    def of(self, column: npt.NDArray[_T]) -> npt.NDArray[_T]:
        """``[n]``: the rows' values in a column of the table; read only, since it may be a view."""
        return column[: len(self.rows)] if self._all else np.take(column, self.rows)

    def of_engines(self, columns: npt.NDArray[_T]) -> npt.NDArray[_T]:
        """``[engines, n]``: the rows' values of each engine; read only, since it may be a view."""
        return columns[:, : len(self.rows)] if self._all else columns[:, self.rows]

    def last_used(self) -> Times:
        """float64 ``[n]``: the last time that each was read."""
        return np.maximum(self.of(self._blocks.last_attended), self.of(self._blocks.last_hit))

    def parents(self) -> Places:
        """intp ``[n + 1]``: position of each one's parent among these rows; ``n`` if it is not
        among them."""
        nobody, parent = len(self.rows), self.of(self._blocks.parent)
        if self._all:
            return np.append(np.where(parent == NO_ROW, nobody, parent), nobody)
        place = np.full(self._blocks.size + 1, nobody)  # the last one stands for NO_ROW
        place[self.rows] = np.arange(nobody)
        return np.append(np.take(place, parent, mode="wrap"), nobody)


def _salted(keys: Keys, salt: np.uint64) -> Keys:
    return keys ^ salt if salt else keys


def as_slice(rows: Rows) -> Rows | slice:
    """The same rows, as a slice if they are consecutive: numpy fills a slice faster."""
    if len(rows) and int(rows[-1]) - int(rows[0]) == len(rows) - 1 and (np.diff(rows) == 1).all():
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return rows
