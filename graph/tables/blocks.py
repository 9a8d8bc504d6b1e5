"""The block table: one row per block, one array per property."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, Final, TypeVar

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
from .hash_index import Counts64, Guesses, HashIndex, KnownBlocks
from .held_rows import HeldRows

# The model's part in the identity of a block.
#
# An engine's block hash covers the block's tokens and all before them, but not the model: in every
# engine the same prompt has the same hash. So the graph mixes a digest of the model's name into
# each key. On the wire, and wherever people read or type a key, it is the engine's own.

NO_SALT: Final = np.uint64(0)
"""For engines without a known model: those that are only observed, and all before their hello."""


@lru_cache(maxsize=256)
def salt_of(model: str) -> np.uint64:
    """Return the 64 bits of BLAKE2b that are mixed into keys of ``model``, in every process."""
    if not model:
        return NO_SALT
    digest = hashlib.blake2b(model.encode(errors="surrogatepass"), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little"))


Mask = npt.NDArray[np.bool_]
Times = npt.NDArray[np.float64]
Counts = npt.NDArray[np.uint32]

DEFAULT_LAYER: Final = SourceLayer.USER_TURN
UNPLACED: Final = 1 << 20
"""Depths from here on are of blocks whose distance from the start is unknown, counted from
where their chain is known. Chosen: deeper than any chain, and small as a tie-break of scores."""
FIRST_KNOWN: Final = UNPLACED + (1 << 16)  # room above it for blocks reported later; chosen


class BlockColumns(Columns):
    """One row per block; its methods are those of ``BlockTable``."""

    alive: Mask = column(np.bool_, True)
    parent: Rows = column(np.int32, NO_ROW)
    depth: Rows = column(np.int32, FIRST_KNOWN)  # blocks before this one in its chain
    layer: npt.NDArray[np.uint8] = column(np.uint8, int(DEFAULT_LAYER))
    flags: npt.NDArray[np.uint8] = column(np.uint8, 0)  # types.BlockFlag
    stated: npt.NDArray[np.uint8] = column(np.uint8, 0)  # types.Authority: who stated the layer
    raised_by: Rows = column(np.int32, NO_ROW)  # the session that stated the layer
    importance: npt.NDArray[np.float32] = column(
        np.float32, float(DEFAULT_IMPORTANCE[DEFAULT_LAYER])
    )
    # Within this block, whose token range is [depth * tokens, (depth + 1) * tokens).
    tokens: npt.NDArray[np.uint16] = column(np.uint16, 0)
    tenant: npt.NDArray[np.int64] = column(np.int64, NO_ROW, rare=True)
    session: Rows = column(np.int32, NO_ROW)  # the last session that walked it
    created: Times = column(np.float64, 0.0, time=True)
    last_attended: Times = column(np.float64, 0.0, time=True)
    last_hit: Times = column(np.float64, NEVER, time=True)
    hit_count: Counts = column(np.uint32, 0)
    walkers: Counts = column(np.uint32, 0)  # distinct requests that walked the link to this block
    children: Counts = column(np.uint32, 0)  # blocks whose parent it is
    shared_children: Counts = column(np.uint32, 0)  # of these, those walked by several requests
    children_walks: Counts = column(np.uint32, 0)  # sum of ``walkers`` of those
    pinned_until: Times = column(np.float64, NEVER, time=True, rare=True)
    # Until this time a request for it is announced, and its copy is loaded back.
    wanted_until: Times = column(np.float64, NEVER, time=True, rare=True)
    confidence: npt.NDArray[np.float32] = column(np.float32, 1.0, rare=True)  # 1: never sampled
    attention: npt.NDArray[np.float32] = column(np.float32, 0.0, rare=True)
    identity: Rows = column(np.int32, NO_ROW, rare=True)  # interned segment name
    chunk: npt.NDArray[np.uint16] = column(np.uint16, 0, rare=True)  # which block of that segment
    salt: Keys = column(np.uint64, NO_SALT)  # what its model mixes into its key


class EdgeSums(Columns):
    """Sums over the stored edges of one type at each block, so that scoring walks no edges."""

    degree: npt.NDArray[np.uint16] = column(np.uint16, 0)  # a count at its maximum stays there
    weight: npt.NDArray[np.float32] = column(np.float32, 0.0)


def known_depth(depth: Rows) -> Rows:
    """Return how many blocks are known to precede each of these depths, int32 ``[n]``."""
    beyond = np.maximum(depth - FIRST_KNOWN, 0)
    return np.where(depth < UNPLACED, depth, beyond).astype(np.int32)


_T = TypeVar("_T", bound=np.generic)
Places = npt.NDArray[np.intp]
Tiers = npt.NDArray[np.uint8]

_INITIAL_ROWS: Final = 1024  # chosen
_COPIES: Final = int(Tier.WARM | Tier.COLD)
_PART: Final = 1 << 14  # rows processed in one slice of long work; chosen


class BlockTable(BlockColumns):
    """Blocks by row. Rows are reused; a row in use is one that ``alive`` marks.

    Attributes (arrays of length ``capacity``, beside ``BlockColumns``):
        keys: uint64, the engine's block hash with the model's salt in it; see ``wire_keys``.
        tiers: uint8 ``[engine columns, capacity]``, types.Tier bits of each engine.
        sums: Sums over edges, for each edge type that ever had a stored edge.
        had_copies: Whether a colder tier of any engine ever held a block.
        lengths: None; used only by ``Front``.
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
        """Rows below this have been used at some time."""
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
        """Return every column by name, cut to the rows ever used; views, read only."""
        size = self.size
        return {"keys": self.keys[:size], "tiers": self.tiers[:, :size], **self.views(size)}

    def load_columns(self, columns: dict[str, npt.NDArray[Any]]) -> None:
        """Replace an empty table's content by the result of ``columns()``."""
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
        """Return the rows in use, int32, ascending."""
        return np.flatnonzero(self.alive[: self.size]).astype(np.int32)

    def parts(self) -> Iterator[slice]:
        """Yield slices of work over all rows ever used, and those added meanwhile."""
        start = 0
        while start < self.size:
            end = min(start + _PART, self.size)
            yield slice(start, end)
            start = end

    def find(self, keys: Keys, salt: np.uint64 = NO_SALT) -> Rows:
        """Return the row of each of a model's keys, int32 ``[n]``; ``NO_ROW`` if unknown."""
        return self._index.find(_salted(keys, salt))

    def find_chains(self, chains: list[bytes], salt: np.uint64, guesses: Guesses) -> KnownBlocks:
        """As ``find``, for whole chains; see ``HashIndex.find_chains``."""
        return self._index.find_chains(self.alive, self.depth, chains, int(salt), guesses)

    def wire_keys(self, rows: Rows | slice | int) -> Keys:
        """Return the keys that engines use for these blocks, uint64 ``[n]``."""
        return self.keys[rows] ^ self.salt[rows]

    def ensure(self, keys: Keys, now: float, salt: np.uint64 = NO_SALT) -> tuple[Rows, Mask]:
        """Return the rows of a model's ``keys`` (repeats allowed), int32 ``[n]``, creating rows for
        unknown keys in their order, and a bool ``[n]`` that marks new rows. ``now``: monotonic
        seconds.
        """
        return self._index.ensure(_salted(keys, salt), self._begins(salt, now), self.alive)

    def complete(self, known: KnownBlocks, now: float, salt: np.uint64) -> Mask | None:
        """As ``ensure``, for keys that were already looked up, whose rows are completed; returns
        None if all were known.
        """
        if not known.unknown:
            return None
        begins = self._begins(salt, now)
        return self._index.complete(known.keys, known.rows, known.unknown, begins, self.alive)

    def release(self, rows: Rows) -> None:
        """Take rows out of use; the caller has removed their edges."""
        self._index.remove(rows)
        self.alive[rows] = False
        self.tiers[:, rows] = 0  # no engine holds them, but the shared store may
        self._rows.give_back(rows)

    def tidying(self) -> Iterator[None]:
        """Make room in a large table ahead of need; no row may be added or removed meanwhile."""
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
        """Make room for the residency of ``columns`` engines."""
        missing = columns - len(self.tiers)
        if missing > 0:
            tiers = np.zeros((columns, self.tiers.shape[1]), dtype=np.uint8)
            tiers[:-missing, : self.size] = self.tiers[:, : self.size]
            self.tiers = tiers
            self._held += [HeldRows() for _ in range(missing)]

    def holding(self, engine: int, tiers: int = int(Tier.HOT)) -> Selection:
        """Return the blocks that this engine holds in any of ``tiers``; by default, in its pool.
        The cost grows with these blocks and those added at the same time, not with the table.
        """
        if not self.had_copies:
            tiers &= ~_COPIES  # there are no copies to find
        return Selection(self, self._held[engine].marked(self.tiers[engine], tiers))

    def resident(self, engine: int) -> Mask:
        """Return which blocks are in this engine's pool, bool ``[size]``; scans all rows."""
        return self.has(engine, np.s_[: self.size], Tier.HOT)

    def last_used(self, rows: Rows) -> Times:
        """Return the last time that each of these rows was read, float64 ``[n]``."""
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
        """Note that this engine holds none of these blocks in any tier."""
        self.tiers[engine, rows] = 0
        self._held[engine].changed()

    def hold(
        self, engine: int, rows: Rows, counts: Counts64, sizes: npt.NDArray[np.uint16], claims: Rows
    ) -> int:
        """Note that an engine stored runs of blocks in its pool; returns how many of them have a
        protected layer that a caller stated.

        Args:
            rows: int32 ``[n]``, one run after another.
            counts: int64 ``[runs]``: blocks per run.
            sizes: uint16 ``[runs]``: tokens per block.
            claims: int32 ``[runs]``: the session that owns blocks without an owner.
        """
        kept = core.hold(self, engine, IS_PROTECTED, rows, counts, sizes, claims)
        self._held[engine].add(rows, self.tiers[engine])
        return kept

    def unhold(self, engine: int, keys: Keys, salt: np.uint64) -> Rows:
        """Note that blocks left an engine's pool; returns the rows that were there, ascending."""
        self._held[engine].changed()
        return self._index.unhold(self.tiers[engine], _salted(keys, salt))

    def has(self, engine: int, rows: Rows | slice, tier: Tier) -> Mask:
        """Return which of these blocks the engine holds in any of these tiers, bool ``[n]``."""
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
        """Return the tiers in which an engine holds each block, uint8 ``[len(picked)]``."""
        return picked.of(self.tiers[engine])

    def copies(self, picked: Selection) -> Tiers:
        """Return the tiers in which any engine holds each block, uint8 ``[len(picked)]``."""
        return np.asarray(np.bitwise_or.reduce(self.tiers[:, picked.rows], axis=0))

    def parents(self, rows: Rows) -> Places:
        """Return the rows' parents' positions, intp ``[n + 1]``: see ``Selection.parents``."""
        return places_of(rows, self.parent[rows])

    def pick(self, mask: Mask) -> Selection:
        """Return the rows for which ``mask``, bool ``[size]``, is true."""
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
    """A selection of rows. Work on it scales with the selection, not with the table.

    Most rows in a table are blocks that left long ago and are kept for their history.

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
        """Return the rows' values in a column of the table, ``[n]``; read only, since it may be a
        view.
        """
        return column[: len(self.rows)] if self._all else np.take(column, self.rows)

    @property
    def blocks_of_each(self) -> npt.NDArray[np.int64] | None:
        """int64 ``[n]``: how many blocks each row stands for; None: one."""
        lengths = self._blocks.lengths
        return None if lengths is None else self.of(lengths)

    def among(self, chosen: Mask) -> Selection:
        """Return a selection of those for which ``chosen``, bool ``[n]``, is true."""
        return Selection(self._blocks, self.rows[chosen])

    def last_used(self) -> Times:
        """Return the last time that each block was read, float64 ``[n]``."""
        return np.maximum(self.of(self._blocks.last_attended), self.of(self._blocks.last_hit))

    def parents(self) -> Places:
        """Return the position of each block's parent among these rows, intp ``[n + 1]``; ``n`` if
        absent.
        """
        return self._blocks.parents(self.rows)


def places_of(rows: Rows, parent: Rows) -> Places:
    """Return each ``parent``'s place in ascending ``rows``, intp ``[n + 1]``; ``n`` if absent."""
    places = np.empty(len(rows) + 1, dtype=np.int64)
    core.parents(rows, parent, places)
    return places


def _salted(keys: Keys, salt: np.uint64) -> Keys:
    return keys ^ salt if salt else keys


def as_slice(rows: Rows) -> Rows | slice:
    """Return the rows as a slice if they are consecutive, since numpy fills a slice faster."""
    if len(rows) and int(rows[-1]) - int(rows[0]) == len(rows) - 1 and (np.diff(rows) == 1).all():
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return rows


# Chains of blocks as vectors: a block is worthless without all blocks before it.

Scores = npt.NDArray[np.float64]

APART: Final = 1024.0  # more than a chain of any length can lower a score
DEPTH_TIE: Final = 1e-5
"""Points of score for each preceding block in a chain: among equals, the deeper block is evicted
first, as when vLLM frees a request tail first."""


def keep_chains_whole(scores: Scores, above: Places, lengths: Places | None = None) -> Scores:
    """Return the scores, float64 ``[n]``, each lowered below those of its descendants.

    If a block were evicted before its child, no request could match the child any more.

    above: Position of each block's parent; see ``Selection.parents``.
        lengths: ``[n]``: the number of blocks of each run, if the entries are runs of blocks, each
            the parent of the next. Scores are then those of a run's first block, and each next
            block scores ``DEPTH_TIE`` more. None: the entries are single blocks.
    """
    lowest = np.array(scores, dtype=np.float64)  # a copy
    core.lower(lowest, above, lengths)
    return lowest
