"""``CopyDirectory``: which blocks have copies, WARM and COLD; the scheduler's record."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import compress, repeat
from operator import not_
from typing import NamedTuple, cast

import msgspec
import numpy as np
import numpy.typing as npt

from ...graph.ranking.copies import CopyOrder
from ...graph.types import Keys, as_keys
from ...graph.wire.advice import BlockIds
from ..keys import key_of, keys_in_pool, keys_of


class VoidedCopies(NamedTuple):
    """Records that workers may release, and those that they may write; see ``TierWork``."""

    release: tuple[int, ...]
    erase: tuple[bytes, ...]
    disown: bool
    named: tuple[tuple[int, bytes], ...]


class ReleasedCopies:
    """Collects copies that were given up or completed, until the workers are told."""

    def __init__(self) -> None:
        self.released: list[int] = []  # copies whose memory is free
        self.erased: list[bytes] = []  # hashes of records on disk
        self.cleared = False  # whether everything was given up
        # Complete copies that no disk has and that may be written there, with their hashes.
        self.named: list[tuple[int, bytes]] = []

    def __bool__(self) -> bool:
        return bool(self.released or self.erased or self.cleared or self.named)

    def take(self) -> VoidedCopies:
        void = VoidedCopies(
            tuple(self.released), tuple(self.erased), self.cleared, tuple(self.named)
        )
        self.released, self.erased, self.cleared, self.named = [], [], False, []
        return void


class Copy(msgspec.Struct, eq=False):  # made without a frame of Python: of a load, by hundreds
    """One block's copy in every worker's memory."""

    id: int  # its number, never reused
    block_hash: bytes  # the hash of the block that it is a copy of
    era: int  # how often the directory had been cleared when the copy was started
    may_demote: bool  # whether it may be written to disk, where another process may read it
    pins: int = 0  # running jobs that read or write it


class Marks(NamedTuple):
    """Which blocks the advice considers worth a copy."""

    worth: Keys  # the key that each block held when advice came, where it is worth a copy, else 0
    passed: npt.NDArray[np.bool_]  # blocks that were examined, and were not worth a copy
    elsewhere: Collection[int]  # keys that are worth a copy, which no block held then
    wanted: Collection[int]  # keys that are worth a copy whatever the sidecar says

    def worthy(
        self, ids: BlockIds, keys: list[int], places: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """Return which of the blocks ``ids``, which hold ``keys``, are worth a copy; and these."""
        marks = self.worth[ids] == as_keys(keys)
        if not marks.all():
            for more in filter(None, (self.wanted, self.elsewhere)):
                marks |= np.fromiter(map(more.__contains__, keys), np.bool_, len(marks))
        self.passed[ids] = ~marks
        chosen = marks.tolist()
        return list(compress(places, chosen)), list(compress(keys, chosen))


class Copies:
    """Complete copies in memory, by hash and by key, in the order in which they make room; see
    ``CopyOrder``. The reference for ``_engine.Copies``, which handles many hashes in one call.
    """

    def __init__(self, plain: bool) -> None:
        self._found: dict[bytes, Copy] = {}
        self._order: CopyOrder[bytes] = CopyOrder(plain)
        self._hashes: dict[int, bytes] = {}  # by the key that advice uses

    def __len__(self) -> int:
        return len(self._found)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._found

    def find(self, block_hash: bytes) -> Copy | None:
        """Return a block's copy; None if there is none."""
        return self._found.get(block_hash)

    def find_all(self, hashes: Iterable[bytes]) -> list[Copy | None]:
        """Return ``find`` of each of these blocks."""
        return list(map(self._found.get, hashes))

    def pinned(self, hashes: Sequence[bytes]) -> list[Copy | None]:
        """Return ``find_all`` of these blocks, with each copy pinned for a job."""
        found = self.find_all(hashes)
        for copy in found:
            if copy is not None:
                copy.pins += 1
        return found

    def run(self, hashes: Sequence[bytes]) -> int:
        """Return how many of ``hashes``, counted from the first, have copies without a gap."""
        found = self._found
        return next((at for at, each in enumerate(hashes) if each not in found), len(hashes))

    def hashes_of(self, keys: Iterable[int]) -> list[bytes | None]:
        """Return, for each of ``keys``, the hash of the block with a copy; None without one."""
        return list(map(self._hashes.get, keys))

    def order(self) -> list[bytes]:
        """Return all hashes, in the order in which their copies make room."""
        return list(self._order)

    def holds_twice(self) -> bool:
        """Return whether any copy is of a block that is also in use in the pool."""
        return self._order.holds_twice()

    def stands_twice(self, block_hash: bytes) -> bool:
        """Return whether the block is also in use in the pool, as far as is known."""
        return self._order.stands_twice(block_hash)

    def used(self, hashes: Sequence[bytes]) -> None:
        """Note that the pool uses the blocks of this chain."""
        self._order.used(hashes)

    def all_leave(self, hashes: Iterable[bytes]) -> None:
        """Note that the pool lost these blocks, or is about to, so that their copies are needed."""
        self._order.all_leave(hashes)

    def all_leave_pool(self, full_hashes: Sequence[bytes]) -> None:
        """As ``all_leave``, for hashes with the prefix cache's group id."""
        if self._order.holds_twice():
            self.all_leave(filter(None, self.hashes_of(keys_in_pool(full_hashes))))

    def lacking(
        self,
        full_hashes: Sequence[bytes],
        ids: BlockIds,
        marks: Marks | None,
        under_way: dict[int, int | None],
        first: int,
    ) -> tuple[Sequence[int], Sequence[int]]:
        """Return which of these blocks, about to leave the pool, are worth a copy by ``marks``
        (None: all are) and have none, finished or ``under_way``; and their keys. Also updates the
        positions in the queue of those that are only under way, by key; ``first`` is the position
        of the first block.
        """
        self.all_leave_pool(full_hashes)
        keys = keys_in_pool(full_hashes)
        places: Sequence[int] = range(len(keys))
        if marks is not None:
            places, keys = marks.worthy(ids, keys, places)
        lacks = list(map(not_, self.hashes_of(keys)))
        lacking = list(zip(compress(places, lacks), compress(keys, lacks), strict=True))
        under_way.update({key: first + at for at, key in lacking if key in under_way})
        lacking = [(at, key) for at, key in lacking if key not in under_way]
        return [at for at, _ in lacking], [key for _, key in lacking]

    def make(
        self, hashes: Sequence[bytes], first: int, era: int, may_demote: Sequence[bool]
    ) -> list[Copy]:
        """Create pinned copies, numbered from ``first`` on, which are not found before
        ``complete``. ``may_demote`` has one value for all, or one for each.
        """
        numbers = range(first, first + len(hashes))
        flags = may_demote if len(may_demote) == len(hashes) else repeat(may_demote[0])
        return list(map(Copy, numbers, hashes, repeat(era), flags, repeat(1)))

    def complete(self, copies: Sequence[Copy], era: int) -> tuple[list[bytes], list[Copy]]:
        """Make copies findable that were started in this ``era``; returns their hashes, and the
        copies that were refused: of another era, or of blocks that have a copy already.
        """
        found, completed, refused = self._found, list[bytes](), list[Copy]()
        for copy in copies:
            copy.pins -= 1
            if copy.era != era or copy.block_hash in found:
                refused.append(copy)
            else:
                found[copy.block_hash] = copy
                completed.append(copy.block_hash)
        self._order.add_all(completed)
        self._hashes.update(zip(keys_of(completed), completed, strict=True))
        return completed, refused

    def victims(self, count: int, advised: Iterable[bytes]) -> list[Copy]:
        """Return the next ``count`` copies to make room that no job uses; see ``CopyOrder``."""
        chosen: dict[bytes, Copy] = {}
        found = self._found
        for block_hash in self._order.first(advised) if count > 0 else ():
            copy = found.get(block_hash)
            if copy is not None and not copy.pins:
                chosen[block_hash] = copy
                if len(chosen) == count:
                    break
        return list(chosen.values())

    def drop(self, copies: Sequence[Copy]) -> tuple[list[bytes], list[int]]:
        """Make copies unfindable; returns their hashes, and the numbers of those no job uses."""
        hashes = [copy.block_hash for copy in copies]
        deque(map(self._found.pop, hashes), maxlen=0)
        self._order.discard_all(hashes)
        deque(map(self._hashes.pop, keys_of(hashes), repeat(None)), maxlen=0)
        return hashes, [copy.id for copy in copies if not copy.pins]

    def unpin(self, copies: Iterable[Copy]) -> list[int]:
        """Note that a job is done; returns the numbers of copies nobody uses or finds any more."""
        found, unused = self._found.get, list[int]()
        for copy in copies:
            copy.pins = pins = copy.pins - 1
            if not pins and found(copy.block_hash) is not copy:
                unused.append(copy.id)
        return unused


def _new_copies(plain: bool, compiled: bool) -> Copies:
    if not compiled:
        return Copies(plain)
    from ..._engine import Copies as Compiled

    return cast(Copies, Compiled(plain))


class CopyDirectory:
    """Finds copies by block hash; only complete copies are found. For methods shared with
    ``Copies``, see there. Another thread may call ``warm_hashes``.
    """

    def __init__(
        self,
        warm_capacity: int = 0,
        cold_capacity: int = 0,
        plain: bool = False,
        compiled: bool = False,  # whether the compiled core keeps the copies in memory
    ) -> None:
        # Copies that fit into every worker's memory, and records that fit on every worker's disk; 0
        # before the workers reported.
        self.warm_capacity, self.cold_capacity = warm_capacity, cold_capacity
        self._warm = warm = _new_copies(plain, compiled)
        self.warm, self.all_warm, self.pinned = warm.find, warm.find_all, warm.pinned
        self.warm_hashes, self.victims = warm.order, warm.victims
        self.all_leave, self.all_leave_pool = warm.all_leave, warm.all_leave_pool
        self.holds_twice, self.stands_twice = warm.holds_twice, warm.stands_twice
        self._cold: OrderedDict[bytes, None] = OrderedDict()
        self._cold_hashes: dict[int, bytes] = {}  # by the key that advice uses
        self._held = self._next = self._era = 0  # held: in memory, complete or not
        self.lost = 0  # copies and records that were given up since the start
        self.voided = ReleasedCopies()  # what was given up or completed, until the workers are told
        # blocks that the shared store held when it was asked for a waiting request
        self.in_store: set[bytes] = set()
        # called with the hashes of blocks that have copies from now on
        self.told: Callable[[list[bytes]], None] = lambda hashes: None

    @property
    def warm_blocks(self) -> int:
        return len(self._warm)

    @property
    def cold_blocks(self) -> int:
        return len(self._cold)

    @property
    def room(self) -> int:
        return self.warm_capacity - self._held

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._warm or block_hash in self._cold

    def still_found(self, copies: Iterable[Copy]) -> list[Copy]:
        """Return those of ``copies`` that can be found and were not replaced."""
        return [copy for copy in copies if self.warm(copy.block_hash) is copy]

    def is_cold(self, block_hash: bytes) -> bool:
        return block_hash in self._cold

    def hashes_of(self, keys: Sequence[int]) -> list[bytes | None]:
        """Return each key's full hash, where its block has a copy, else None."""
        found = self._warm.hashes_of(keys)
        if not self._cold_hashes:
            return found
        cold = map(self._cold_hashes.get, keys)
        return [one or other for one, other in zip(found, cold, strict=True)]

    def lacking(
        self,
        full_hashes: Sequence[bytes],
        ids: BlockIds,
        marks: Marks | None,
        under_way: dict[int, int | None],
        first: int,
    ) -> tuple[Sequence[int], Sequence[int]]:
        """Return which blocks are worth a copy and have none anywhere; see ``Copies.lacking``."""
        places, keys = self._warm.lacking(full_hashes, ids, marks, under_way, first)
        if not self._cold_hashes:
            return places, keys
        lacks = [key not in self._cold_hashes for key in keys]
        return list(compress(places, lacks)), list(compress(keys, lacks))

    def cold_hashes(self) -> list[bytes]:
        """Return the blocks on disk, least recently used first; safe from another thread."""
        return list(self._cold)

    def run(self, hashes: Sequence[bytes], most_reads: int | None = None) -> int:
        """Return how many of ``hashes``, counted from the first without a gap, can be loaded now if
        at most ``most_reads`` of them are first read into memory; None: as many as there is room
        for.
        """
        count = self._warm.run(hashes)
        if count == len(hashes) or not (self._cold or self.in_store):
            return count
        reads, most = 0, self.room if most_reads is None else most_reads
        for at in range(count, len(hashes)):
            block_hash = hashes[at]
            if block_hash in self._warm:
                continue
            reads += 1
            if reads > most or not (block_hash in self._cold or block_hash in self.in_store):
                return at
        return len(hashes)

    def begin(self, block_hash: bytes, may_demote: bool = True) -> Copy:
        """Start a copy, which is pinned and not found before ``complete_all``; there must be
        ``room``.
        """
        (copy,) = self.begin_all([block_hash], (may_demote,))
        return copy

    def begin_all(self, hashes: Sequence[bytes], may_demote: Sequence[bool]) -> list[Copy]:
        """Start copies; there must be ``room``. ``may_demote`` has one value for all, or one for
        each.
        """
        assert len(hashes) <= self.room
        copies = self._warm.make(hashes, self._next + 1, self._era, may_demote)
        self._held += len(copies)
        self._next += len(copies)
        return copies

    def complete_all(self, copies: Sequence[Copy]) -> list[bytes]:
        """Note that the copies' bytes are written; returns the hashes that can be found from now
        on.
        """
        completed, refused = self._warm.complete(copies, self._era)
        for copy in refused:
            self.abandon(copy)
        if self.cold_capacity:
            new = filter(None, self.all_warm(completed))
            self.voided.named += [
                (copy.id, copy.block_hash)
                for copy in new
                if copy.may_demote and copy.block_hash not in self._cold
            ]
        self.told(completed)
        return completed

    def holds(self, copy: Copy) -> bool:
        """Return whether the copy's bytes match its hash: nothing was cleared since it was
        started.
        """
        return copy.era == self._era

    def abandon(self, copy: Copy) -> None:
        """Free the memory of a copy that is not, or no longer, findable."""
        self._held -= 1
        self.voided.released.append(copy.id)

    def used(self, hashes: Sequence[bytes]) -> None:
        """Note that the pool uses this chain; on disk, its tail will be dropped before its head."""
        self._warm.used(hashes)
        self.reads(hashes)

    def reads(self, hashes: Sequence[bytes]) -> None:
        """Note that a load reads this chain: its blocks on disk are dropped last."""
        cold = self._cold
        for block_hash in reversed(hashes if cold else ()):
            if block_hash in cold:
                cold.move_to_end(block_hash)

    def drop_all(self, copies: Sequence[Copy]) -> list[bytes]:
        """Drop complete, findable copies; their memory is freed once the jobs that use it are done.
        Returns their hashes.
        """
        hashes, unused = self._warm.drop(copies)
        self.lost += len(hashes)
        self._release(unused)
        return hashes

    def unpin_all(self, copies: Iterable[Copy]) -> None:
        """Note that a job that used these copies is done."""
        self._release(self._warm.unpin(copies))

    def add_cold(self, block_hash: bytes) -> None:
        """Note that a record is complete on every worker's disk."""
        self._cold[block_hash] = None
        self._cold_hashes[key_of(block_hash)] = block_hash

    def drop_cold(self, block_hash: bytes) -> None:
        if block_hash in self._cold:
            self.lost += 1
            del self._cold[block_hash]
            self._cold_hashes.pop(key_of(block_hash), None)
        self.voided.erased.append(block_hash)

    def oldest_cold(self, count: int) -> list[bytes]:
        return [block_hash for block_hash, _ in zip(self._cold, range(count), strict=False)]

    def clear(self) -> None:
        """Drop all copies: the blocks' bytes no longer follow from their hashes."""
        self._era += 1
        self.voided.cleared = True
        self.in_store.clear()
        self.drop_all(list(filter(None, self.all_warm(self.warm_hashes()))))
        for block_hash in list(self._cold):
            self.drop_cold(block_hash)

    def _release(self, numbers: list[int]) -> None:
        self._held -= len(numbers)
        self.voided.released += numbers

    def check_integrity(self) -> None:
        """Assert the invariants; for tests."""
        assert 0 <= self._held <= self.warm_capacity
        assert len(self._warm) <= self._held
        hashes = self.warm_hashes()
        assert len(self._warm) == len(hashes) == len(set(hashes))
        assert len(self._cold) <= self.cold_capacity
        assert {key_of(each) for each in self._cold} == self._cold_hashes.keys()
        assert self._warm.hashes_of(keys_of(hashes)) == hashes
        copies = self.all_warm(hashes)
        assert [copy.block_hash for copy in copies if copy is not None] == hashes
