"""The block table: one row a block, one array a property."""

from __future__ import annotations

from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from ..types import (
    DEFAULT_IMPORTANCE,
    NEVER,
    NO_ROW,
    NUM_EDGE_TYPES,
    Keys,
    Rows,
    SourceLayer,
    Tier,
)
from .hash_index import HashIndex
from .identity import NO_SALT
from .row_pool import RowPool

_T = TypeVar("_T", bound=np.generic)
Places = npt.NDArray[np.intp]

DEFAULT_LAYER: Final = SourceLayer.USER_TURN
_INITIAL_ROWS: Final = 1024

# name: (dtype, value of a fresh row). Times are monotonic seconds.
_COLUMNS: Final[dict[str, tuple[Any, Any]]] = {
    "parent": (np.int32, NO_ROW),
    "depth": (np.int32, 0),  # blocks before this one in its chain
    "layer": (np.uint8, int(DEFAULT_LAYER)),
    "flags": (np.uint8, 0),  # types.BlockFlag
    "stated": (np.uint8, 0),  # types.Authority: whose word the layer is
    "raised_by": (np.int32, NO_ROW),  # the session whose word it is
    "importance": (np.float32, float(DEFAULT_IMPORTANCE[DEFAULT_LAYER])),
    "tokens": (np.uint16, 0),  # in this block: its range is [depth * tokens, (depth + 1) * tokens)
    "tenant": (np.int64, NO_ROW),
    "session": (np.int32, NO_ROW),  # the last session that walked it
    "created": (np.float64, 0.0),
    "last_attended": (np.float64, 0.0),
    "last_hit": (np.float64, NEVER),
    "hit_count": (np.uint32, 0),
    "walkers": (np.uint32, 0),  # distinct requests that walked the link parent → this block
    "pinned_until": (np.float64, NEVER),
    "confidence": (np.float32, 1.0),
    "attention": (np.float32, 0.0),
    "identity": (np.int32, NO_ROW),  # interned segment name
    "chunk": (np.uint16, 0),  # which block of that segment
    "embedding": (np.int32, NO_ROW),
    "salt": (np.uint64, NO_SALT),  # what its model adds to its key
}


class BlockTable:
    """Blocks by row. Rows are reused; a row in use is one that ``alive`` marks.

    Attributes (arrays of length ``capacity``; see ``_COLUMNS`` for the plain ones):
        keys: uint64, the engine's block hash with the model's salt in it; see ``wire_keys``.
        tiers: uint8 ``[engine columns, capacity]``, types.Tier bits of each engine.
        degree: uint16 ``[edge types, capacity]``, edges at the block.
        edge_weight: float32 ``[edge types, capacity]``, their summed weight.
    """

    parent: Rows
    depth: Rows
    layer: npt.NDArray[np.uint8]
    flags: npt.NDArray[np.uint8]
    stated: npt.NDArray[np.uint8]
    raised_by: Rows
    importance: npt.NDArray[np.float32]
    tokens: npt.NDArray[np.uint16]
    tenant: npt.NDArray[np.int64]
    session: Rows
    created: npt.NDArray[np.float64]
    last_attended: npt.NDArray[np.float64]
    last_hit: npt.NDArray[np.float64]
    hit_count: npt.NDArray[np.uint32]
    walkers: npt.NDArray[np.uint32]
    pinned_until: npt.NDArray[np.float64]
    confidence: npt.NDArray[np.float32]
    attention: npt.NDArray[np.float32]
    identity: Rows
    chunk: npt.NDArray[np.uint16]
    embedding: Rows
    salt: Keys

    def __init__(self) -> None:
        self._rows = RowPool()
        self._index = HashIndex(_INITIAL_ROWS)
        for name, (dtype, fresh) in _COLUMNS.items():
            setattr(self, name, np.full(_INITIAL_ROWS, fresh, dtype=dtype))
        self.alive = np.zeros(_INITIAL_ROWS, dtype=np.bool_)
        self.tiers = np.zeros((1, _INITIAL_ROWS), dtype=np.uint8)
        self.degree = np.zeros((NUM_EDGE_TYPES, _INITIAL_ROWS), dtype=np.uint16)
        self.edge_weight = np.zeros((NUM_EDGE_TYPES, _INITIAL_ROWS), dtype=np.float32)

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
        plain = sum(getattr(self, name).nbytes for name in _COLUMNS)
        wide = self.alive.nbytes + self.tiers.nbytes + self.degree.nbytes + self.edge_weight.nbytes
        return int(plain + wide + self._index.nbytes + self._rows.nbytes)

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """Every column by name, cut to the rows ever used; views, for reading."""
        plain = {name: getattr(self, name)[: self.size] for name in _COLUMNS}
        wide = {name: getattr(self, name)[:, : self.size] for name in _WIDE}
        return {"keys": self.keys[: self.size], "alive": self.alive[: self.size], **plain, **wide}

    def load_columns(self, columns: dict[str, npt.NDArray[Any]]) -> None:
        """Replace an empty table's content by what ``columns()`` gave."""
        size = len(columns["alive"])
        self._reserve(size)
        free = np.flatnonzero(~columns["alive"]).astype(np.int32)
        self._rows.restore(size, free)
        for name in ("alive", *_COLUMNS):
            getattr(self, name)[:size] = columns[name]
        self.reserve_engines(len(columns["tiers"]))
        for name in _WIDE:
            getattr(self, name)[: len(columns[name]), :size] = columns[name]
        live = self.live_rows()
        self._index.insert(columns["keys"][live], live)

    def live_rows(self) -> Rows:
        """int32: the rows in use, ascending."""
        return np.flatnonzero(self.alive[: self.size]).astype(np.int32)

    def find(self, keys: Keys, salt: np.uint64 = NO_SALT) -> Rows:
        """int32 ``[n]``: the row of each of a model's keys, ``NO_ROW`` where it is unknown."""
        return self._index.find(_salted(keys, salt))

    def find_all(self, key: int) -> Selection:
        """The blocks of all models that engines call ``key``; a scan."""
        named = self.wire_keys(np.s_[: self.size]) == np.uint64(key)
        return self.pick(named & self.alive[: self.size])

    def wire_keys(self, rows: Rows | slice | int) -> Keys:
        """uint64 ``[n]``: how engines call these blocks."""
        return self.keys[rows] ^ self.salt[rows]

    def ensure(
        self, keys: Keys, now: float, salt: np.uint64 = NO_SALT
    ) -> tuple[Rows, npt.NDArray[np.bool_]]:
        """Rows of ``keys`` (repeats allowed), created where unknown, in the order of ``keys``.

        Args:
            keys: uint64 ``[n]``, as the engine calls them.
            now: When.
            salt: The engine's model's.

        Returns:
            rows int32 ``[n]``, and a bool ``[n]`` that is true where the row is new.
        """
        keys = _salted(keys, salt)
        rows = self._index.find(keys)
        new = rows == NO_ROW
        if new.any():
            missing = keys[new]
            distinct, first, inverse = np.unique(missing, return_index=True, return_inverse=True)
            created = np.empty(len(distinct), dtype=np.int32)
            appearance = np.argsort(first)
            created[appearance] = self._create(distinct[appearance], salt, now)
            rows[new] = created[inverse]
        return rows, new

    def release(self, rows: Rows) -> None:
        """Take rows out of use; the caller has removed their edges."""
        self._index.remove(rows)
        self.alive[rows] = False
        gone = np.zeros(self.size + 1, dtype=np.bool_)  # the last one stands for NO_ROW
        gone[rows] = True
        orphans = gone[self.parent[: self.size]]
        self.parent[: self.size][orphans] = NO_ROW
        self._rows.give_back(rows)

    def forget_sessions(self, rows: Rows) -> None:
        """These session rows are to be reused: no block is theirs any more, and no word."""
        for column in (self.session[: self.size], self.raised_by[: self.size]):
            column[np.isin(column, rows)] = NO_ROW

    def reserve_engines(self, columns: int) -> None:
        """Make room for the residency of so many engines."""
        missing = columns - len(self.tiers)
        if missing > 0:
            fresh = np.zeros((missing, self.tiers.shape[1]), dtype=np.uint8)
            self.tiers = np.concatenate([self.tiers, fresh])

    def resident(self, engine: int) -> npt.NDArray[np.bool_]:
        """bool ``[size]``: the blocks in this engine's pool."""
        return np.asarray((self.tiers[engine, : self.size] & int(Tier.HOT)) != 0)

    def held(self) -> npt.NDArray[np.bool_]:
        """bool ``[size]``: the blocks of which any tier of any engine has a copy."""
        return np.asarray(self.tiers[:, : self.size].any(axis=0))

    def pick(self, mask: npt.NDArray[np.bool_]) -> Selection:
        """The rows where ``mask``, bool ``[size]``, is true."""
        return Selection(self, np.flatnonzero(mask).astype(np.int32))

    def sample(self, most: int) -> Selection:
        """About ``most`` rows, evenly over the table; whether in use or not."""
        step = max(1, self.size // most)
        return Selection(self, np.arange(0, self.size, step, dtype=np.int32))

    def _create(self, keys: Keys, salt: np.uint64, now: float) -> Rows:
        rows = self._rows.take(len(keys))
        self._reserve(self.size)
        self._index.insert(keys, rows)
        at = _as_slice(rows)
        for name, (_, fresh) in _COLUMNS.items():
            getattr(self, name)[at] = fresh
        for name in _WIDE:
            getattr(self, name)[:, at] = 0
        self.alive[at] = True
        self.created[at] = self.last_attended[at] = now
        if salt:
            self.salt[at] = salt
        return rows

    def _reserve(self, rows: int) -> None:
        capacity = len(self.alive)
        if rows <= capacity:
            return
        # Growing by an eighth keeps the slack under the budget of bytes a block.
        capacity = max(rows, capacity + capacity // 8)
        self._index.grow(capacity)
        for name in ("alive", *_COLUMNS):
            setattr(self, name, _grown(getattr(self, name), capacity))
        for name in _WIDE:
            setattr(self, name, _grown(getattr(self, name), capacity))


class Selection:
    """Some rows of the table: what is computed of them costs nothing for all the others.

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
        """``[n]``: their values in a column of the table; for reading, it may be a view."""
        return column[: len(self.rows)] if self._all else np.take(column, self.rows)

    def last_used(self) -> npt.NDArray[np.float64]:
        """float64 ``[n]``: the last time anything read each of them."""
        return np.maximum(self.of(self._blocks.last_attended), self.of(self._blocks.last_hit))

    def parents(self) -> Places:
        """intp ``[n + 1]``: where among these rows each one's parent stands; ``n``: nowhere."""
        nobody = len(self.rows)
        place = np.full(self._blocks.size + 1, nobody)  # the last one stands for NO_ROW
        place[self.rows] = np.arange(nobody)
        return np.append(np.take(place, self.of(self._blocks.parent), mode="wrap"), nobody)


_WIDE: Final = ("tiers", "degree", "edge_weight")


def _salted(keys: Keys, salt: np.uint64) -> Keys:
    return keys ^ salt if salt else keys


def _grown(column: npt.NDArray[Any], capacity: int) -> npt.NDArray[Any]:
    """A copy with room for ``capacity`` rows (the last axis)."""
    grown = np.zeros((*column.shape[:-1], capacity), dtype=column.dtype)
    grown[..., : column.shape[-1]] = column
    return grown


def _as_slice(rows: Rows) -> Rows | slice:
    """The same rows; as a slice, which numpy fills faster, where they are consecutive."""
    if len(rows) and int(rows[-1]) - int(rows[0]) == len(rows) - 1 and (np.diff(rows) == 1).all():
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return rows
