"""The block table: one row per block, one array per property."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from ..compiled import core
from ..types import (
    DEFAULT_IMPORTANCE,
    IS_PROTECTED,
    NEVER,
    NO_ROW,
    BlockFlag,
    EdgeType,
    Keys,
    Rows,
    SourceLayer,
    Tier,
)
from .columns import Columns, RowPool, column, more_than, refilled, taken_in_parts
from .hash_index import Counts64, Guesses, HashIndex
from .held_rows import HeldRows

# A model's part in the identity of a block.
#
# An engine's block hash covers the block's tokens and all before them, but not the model: in
# every engine the same prompt has the same hash. So the graph mixes a digest of the model's
# name into each key. On the wire, and wherever people read or type a key, it is the engine's
# own.

NO_SALT: Final = np.uint64(0)
"""Of engines that name no model: those that are only observed, and all before their hello."""


@lru_cache(maxsize=256)
def salt_of(model: str) -> np.uint64:
    """What ``model`` adds to its blocks' keys, the same in every process: 64 bits of BLAKE2b."""
    if not model:
        return NO_SALT
    digest = hashlib.blake2b(model.encode(errors="surrogatepass"), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little"))


# The properties of a block, one column each, and of the stored edges at it.

Mask = npt.NDArray[np.bool_]
Times = npt.NDArray[np.float64]
Counts = npt.NDArray[np.uint32]

DEFAULT_LAYER: Final = SourceLayer.USER_TURN
UNPLACED: Final = 1 << 20
"""Depths from here on are of blocks whose distance from the start is unknown, counted from
where their chain is known. Chosen: deeper than chains are, and worth little as a tie of scores."""
FIRST_KNOWN: Final = UNPLACED + (1 << 16)  # room above it for blocks that are told later; chosen


class BlockColumns(Columns):
    """One row per block; its methods are those of ``BlockTable``."""

    alive: Mask = column(np.bool_, True)
    parent: Rows = column(np.int32, NO_ROW)
    depth: Rows = column(np.int32, FIRST_KNOWN)  # blocks before this one in its chain
    layer: npt.NDArray[np.uint8] = column(np.uint8, int(DEFAULT_LAYER))
    flags: npt.NDArray[np.uint8] = column(np.uint8, 0)  # types.BlockFlag
    stated: npt.NDArray[np.uint8] = column(np.uint8, 0)  # types.Authority: who stated the layer
    raised_by: Rows = column(np.int32, NO_ROW)  # the session that stated it
    importance: npt.NDArray[np.float32] = column(
        np.float32, float(DEFAULT_IMPORTANCE[DEFAULT_LAYER])
    )
    # In this block: its range is [depth * tokens, (depth + 1) * tokens).
    tokens: npt.NDArray[np.uint16] = column(np.uint16, 0)
    tenant: npt.NDArray[np.int64] = column(np.int64, NO_ROW, rare=True)
    session: Rows = column(np.int32, NO_ROW)  # the last session that walked it
    created: Times = column(np.float64, 0.0, time=True)
    last_attended: Times = column(np.float64, 0.0, time=True)
    last_hit: Times = column(np.float64, NEVER, time=True)
    hit_count: Counts = column(np.uint32, 0)
    walkers: Counts = column(np.uint32, 0)  # distinct requests that walked the link to this block
    children: Counts = column(np.uint32, 0)  # blocks that it is the parent of
    shared_children: Counts = column(np.uint32, 0)  # of these: walked twice or more
    children_walks: Counts = column(np.uint32, 0)  # the walkers of those, summed
    pinned_until: Times = column(np.float64, NEVER, time=True, rare=True)
    # Somebody said that it will be asked for until then: its copy is brought back.
    wanted_until: Times = column(np.float64, NEVER, time=True, rare=True)
    confidence: npt.NDArray[np.float32] = column(np.float32, 1.0, rare=True)  # 1: never sampled
    attention: npt.NDArray[np.float32] = column(np.float32, 0.0, rare=True)
    identity: Rows = column(np.int32, NO_ROW, rare=True)  # interned segment name
    chunk: npt.NDArray[np.uint16] = column(np.uint16, 0, rare=True)  # which block of that segment
    salt: Keys = column(np.uint64, NO_SALT)  # what its model adds to its key


class EdgeSums(Columns):
    """What the stored edges of one type at each block sum up to, so that a score walks none."""

    degree: npt.NDArray[np.uint16] = column(np.uint16, 0)  # a count that reached the top stays
    weight: npt.NDArray[np.float32] = column(np.float32, 0.0)


def known_depth(depth: Rows) -> Rows:
    """int32 ``[n]``: how many blocks stand before each, as far as its chain is known; of the
    ``depth`` column.
    """
    beyond = np.maximum(depth - FIRST_KNOWN, 0)
    return np.where(depth < UNPLACED, depth, beyond).astype(np.int32)


class KnownBlocks(NamedTuple):
    keys: Keys  # uint64 ``[n]``: the graph's, chain after chain
    rows: Rows  # int32 ``[n]``: ``NO_ROW`` where it is not known
    unknown: int  # how many are not
    bad: int  # how many chains have a key twice


_T = TypeVar("_T", bound=np.generic)
Places = npt.NDArray[np.intp]
Tiers = npt.NDArray[np.uint8]

_INITIAL_ROWS: Final = 1024  # chosen
_COPIES: Final = int(Tier.WARM | Tier.COLD)
_PART: Final = 1 << 14  # rows that one slice of long work looks at; chosen


class BlockTable(BlockColumns):
    """Blocks by row. Rows are reused; a row in use is one that ``alive`` marks.

    Attributes (arrays of length ``capacity``, beside ``BlockColumns``):
        keys: uint64, the engine's block hash with the model's salt in it; see ``wire_keys``.
        tiers: uint8 ``[engine columns, capacity]``, types.Tier bits of each engine.
        sums: By type, for types that ever had a stored edge.
        had_copies: Whether a colder tier of any engine ever held a block.
        lengths: None; see ``Front``.
    """

    lengths: Places | None = None

    def __init__(self) -> None:
        super().__init__(_INITIAL_ROWS)
        self.bound = core.BlockColumns()  # where compiled loops find the columns
        self.alive[:] = False
        self._rows = RowPool()
        self._index = HashIndex(_INITIAL_ROWS)
        self.tiers = np.zeros((1, _INITIAL_ROWS), dtype=np.uint8)
        self._held = [HeldRows()]  # by engine column
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
        sums = sum(each.columns_nbytes(self.size) for each in self.sums.values())
        held = len(self.tiers) * self.size + sum(each.nbytes for each in self._held)
        own = self.columns_nbytes(self.size) + self._index.nbytes(self.size)
        own += core.heads_nbytes(self)
        return own + held + sums + self._rows.nbytes

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
        for engine, bits in enumerate(columns["tiers"]):
            self._held[engine].add(np.flatnonzero(bits).astype(np.int32), self.tiers[engine])
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
        return self._index.find(_salted(keys, salt))

    def find_chains(
        self, keys: Keys, salt: np.uint64, counts: Counts64, guesses: Guesses, bad: Mask
    ) -> KnownBlocks:
        """As ``find``, of chains; see ``HashIndex.find_chains``."""
        keys = _salted(keys, salt)
        found = self._index.find_chains(self.alive, self.depth, keys, counts, guesses, bad)
        return KnownBlocks(keys, *found)

    def wire_keys(self, rows: Rows | slice | int) -> Keys:
        """uint64 ``[n]``: how engines call these blocks."""
        return self.keys[rows] ^ self.salt[rows]

    def ensure(self, keys: Keys, now: float, salt: np.uint64 = NO_SALT) -> tuple[Rows, Mask]:
        """Rows of a model's ``keys`` (repeats allowed), int32 ``[n]``, created where unknown, in
        the order of ``keys``, and a bool ``[n]`` that is true where the row is new. ``now``:
        monotonic seconds.
        """
        return self._index.ensure(_salted(keys, salt), self._begins(salt, now), self.alive)

    def completed(self, known: KnownBlocks, now: float, salt: np.uint64) -> tuple[Rows, Mask]:
        """As ``ensure``, of keys that were looked for."""
        keys, rows, unknown, _ = known
        return rows, self._index.complete(keys, rows, unknown, self._begins(salt, now), self.alive)

    def release(self, rows: Rows) -> None:
        """Take rows out of use; the caller has removed their edges."""
        self._index.remove(rows)
        self.alive[rows] = False
        self.tiers[:, rows] = 0  # no engine holds them, but the shared store may
        self._rows.give_back(rows)

    def tidying(self) -> Iterator[None]:
        """Make more room in a large table ahead of need; no block may come or go meanwhile."""
        yield from self._index.tidying(self.alive, self.size)
        yield from self.growing_ahead(self.size)

    def forget_sessions(self, rows: Rows) -> None:
        """Remove these session rows, which are about to be reused, from all blocks."""
        named = self.session[: self.size], self.raised_by[: self.size]
        highest = max(int(each.max(initial=0)) for each in (rows, *named))
        gone = np.zeros(highest + 2, dtype=np.bool_)  # the last one stands for NO_ROW
        gone[rows] = True
        for sessions in named:
            sessions[gone[sessions]] = NO_ROW

    def reserve_engines(self, columns: int) -> None:
        """Make room for the residency of so many engines."""
        missing = columns - len(self.tiers)
        if missing > 0:
            tiers = np.zeros((columns, self.tiers.shape[1]), dtype=np.uint8)
            tiers[:-missing, : self.size] = self.tiers[:, : self.size]
            self.tiers = tiers
            self._held += [HeldRows() for _ in range(missing)]

    def holding(self, engine: int, tiers: int = int(Tier.HOT)) -> Selection:
        """What this engine holds in any of some tiers, its pool for one. Its cost grows with
        these blocks, and those that came at the same time, and not with the table.
        """
        if not self.had_copies:
            tiers &= ~_COPIES  # there are no copies to find
        return Selection(self, self._held[engine].marked(self.tiers[engine], tiers))

    def resident(self, engine: int) -> Mask:
        """bool ``[size]``: the blocks in this engine's pool, for whoever looks at all rows."""
        return self.has(engine, np.s_[: self.size], Tier.HOT)

    def last_used(self, rows: Rows) -> Times:
        """float64 ``[n]``: the last time that each of these rows was read."""
        return np.maximum(self.last_attended[rows], self.last_hit[rows])

    def mark(self, engine: int, rows: Rows | slice, tier: Tier) -> None:
        bits = self.tiers[engine]
        new = np.flatnonzero(bits[rows] == 0)  # the others are noted already
        bits[rows] |= np.uint8(int(tier))
        self._held[engine].changed()
        if len(new):
            noted = new + rows.start if isinstance(rows, slice) else rows[new]
            self._held[engine].add(noted, bits)
        self.had_copies |= bool(int(tier) & _COPIES)

    def unmark(self, engine: int, rows: Rows | slice, tier: Tier) -> None:
        self.tiers[engine, rows] &= ~np.uint8(int(tier))
        self._held[engine].changed()

    def unmark_all(self, engine: int, rows: slice) -> None:
        """Note that this engine holds none of these blocks, in no tier."""
        self.tiers[engine, rows] = 0
        self._held[engine].changed()

    def hold(
        self, engine: int, rows: Rows, counts: Counts64, sizes: npt.NDArray[np.uint16], claims: Rows
    ) -> int:
        """Note that an engine stored runs of blocks in its pool; returns how many of them have a
        protected layer that was stated.

        Args:
            rows: int32 ``[n]``, run after run.
            counts: int64 ``[runs]``: blocks of each.
            sizes: uint16 ``[runs]``: tokens of a block.
            claims: int32 ``[runs]``: the session that owns blocks without an owner.
        """
        kept = core.hold(self, engine, IS_PROTECTED, rows, counts, sizes, claims)
        self._held[engine].add(rows, self.tiers[engine])
        return kept

    def unhold(self, engine: int, keys: Keys, salt: np.uint64) -> Rows:
        """Note that blocks left an engine's pool; returns the rows of those that were there, int32,
        ascending.
        """
        self._held[engine].changed()
        return self._index.unhold(self.tiers[engine], _salted(keys, salt))

    def has(self, engine: int, rows: Rows | slice, tier: Tier) -> Mask:
        """bool ``[n]``: which of these blocks the engine holds in any of the tiers in ``tier``."""
        return np.asarray((self.tiers[engine, rows] & int(tier)) != 0)

    def flag(self, rows: Rows | slice, flag: BlockFlag) -> None:
        self.flags[rows] |= np.uint8(int(flag))

    def unflag(self, rows: Rows | slice, flag: BlockFlag) -> None:
        self.flags[rows] &= ~np.uint8(int(flag))

    def flagged(self, rows: Rows | slice, flag: BlockFlag) -> Mask:
        return np.asarray((self.flags[rows] & int(flag)) != 0)

    def sums_of(self, kind: EdgeType) -> EdgeSums:
        if kind not in self.sums:
            self.sums[kind] = EdgeSums(len(self.alive))
        return self.sums[kind]

    def own_tiers(self, engine: int, picked: Selection) -> Tiers:
        """uint8 ``[len(picked)]``: the tiers in which an engine holds each."""
        return picked.of(self.tiers[engine])

    def copies(self, picked: Selection) -> Tiers:
        """uint8 ``[len(picked)]``: the tiers in which any engine holds each."""
        return np.asarray(np.bitwise_or.reduce(self.tiers[:, picked.rows], axis=0))

    def parents(self, rows: Rows) -> Places:
        """intp ``[n + 1]``: see ``Selection.parents``."""
        return places_of(rows, self.parent[rows])

    def pick(self, mask: Mask) -> Selection:
        """The rows where ``mask``, bool ``[size]``, is true."""
        return Selection(self, np.flatnonzero(mask).astype(np.int32))

    def _begins(self, salt: np.uint64, now: float) -> Callable[[int], Rows]:
        """Takes rows for so many new blocks, in order, and makes them fresh."""
        begun = np.float64(now).tobytes()
        own = {"created": begun, "last_attended": begun, "salt": salt.tobytes()}

        def begin(count: int) -> Rows:
            rows = self._rows.take(count)
            self._reserve(self.size)
            columns, values = self.fresh(own)
            for each in self.sums.values():
                more, theirs = each.fresh()
                columns, values = columns + more, values + theirs
            core.refresh(columns, values, rows, self.tiers)
            return rows

        return begin

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

    @property
    def blocks_of_each(self) -> npt.NDArray[np.int64] | None:
        """int64 ``[n]``: how many blocks each stands for; None: itself."""
        lengths = self._blocks.lengths
        return None if lengths is None else self.of(lengths)

    def last_used(self) -> Times:
        """float64 ``[n]``: the last time that each was read."""
        return np.maximum(self.of(self._blocks.last_attended), self.of(self._blocks.last_hit))

    def parents(self) -> Places:
        """intp ``[n + 1]``: position of each one's parent among these rows; ``n`` if not there."""
        return self._blocks.parents(self.rows)


def places_of(rows: Rows, parent: Rows) -> Places:
    """intp ``[n + 1]``: where each parent stands among ``rows``, int32 ``[n]``, ascending; ``n``
    where it does not.
    """
    places = np.empty(len(rows) + 1, dtype=np.int64)
    core.parents(rows, parent, places)
    return places


def _salted(keys: Keys, salt: np.uint64) -> Keys:
    return keys ^ salt if salt else keys


def as_slice(rows: Rows) -> Rows | slice:
    """The same rows, as a slice if they are consecutive: numpy fills a slice faster."""
    if len(rows) and int(rows[-1]) - int(rows[0]) == len(rows) - 1 and (np.diff(rows) == 1).all():
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return rows


# Chains of blocks in vectors: a block is worth nothing without all that stand before it.

Scores = npt.NDArray[np.float64]

APART: Final = 1024.0  # more than chains lower a score by, however long they are
DEPTH_TIE: Final = 1e-5
"""Of a score, for each block before one in its chain: of equals the deeper goes first, as when vLLM
frees a request tail first."""


def keep_chains_whole(scores: Scores, above: Places, lengths: Places | None = None) -> Scores:
    """float64 ``[n]``: each score lowered below those of its descendants.

    If a block were evicted before its child, the child could never match again.

    Args:
        above: Position of each one's parent; see ``Selection.parents``.
        lengths: ``[n]``: where these are runs of blocks, each the parent of the next, how many each
            has; their scores, and what is found, are those of the first ones, and each next one's
            is ``DEPTH_TIE`` more. None: they are blocks.
    """
    lowest = np.array(scores, dtype=np.float64)  # a copy
    core.lower(lowest, above, lengths)
    return lowest
