"""``CopyDirectory``: which blocks have copies in the WARM and COLD tiers; the scheduler's
record."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import NamedTuple

import msgspec

from ...graph.ranking.copies import CopyOrder
from ..keys import key_of, keys_in_pool, keys_of


class VoidedCopies(NamedTuple):
    """What workers must give up or may write, as in ``TierWork``."""

    release: tuple[int, ...]
    erase: tuple[bytes, ...]
    disown: bool
    named: tuple[tuple[int, bytes], ...]


class ReleasedCopies:
    """Collects what was given up or completed, until the workers are told."""

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

    id: int  # its number, used once
    block_hash: bytes  # the hash of the block that it is a copy of
    era: int  # how often the directory had been cleared when the copy was begun
    may_demote: bool  # whether it may be written to disk, and so reach another process
    pins: int = 0  # jobs under way that read or write it


def _nobody_listens(hashes: list[bytes]) -> None:
    pass


class CopyDirectory:
    """Finds copies by block hash; only complete copies are found. ``warm_capacity``: copies that
    fit into every worker's memory, 0 before the workers reported; ``cold_capacity``: records that
    fit on every worker's disk."""

    def __init__(self, warm_capacity: int = 0, cold_capacity: int = 0, plain: bool = False) -> None:
        self.warm_capacity, self.cold_capacity = warm_capacity, cold_capacity
        self._warm: dict[bytes, Copy] = {}
        self._order: CopyOrder[bytes] = CopyOrder(plain)  # of those in memory
        self._cold: OrderedDict[bytes, None] = OrderedDict()
        self._hashes: dict[int, bytes] = {}  # by the key that advice uses
        self._held = self._next = self._era = self.lost = 0  # held: in memory, complete or not
        self.voided = ReleasedCopies()  # what was given up or completed, until the workers are told
        # tells whether any copy is of a block that is in use in the pool
        self.holds_twice = self._order.holds_twice
        # blocks that the shared store held when it was asked for a waiting request
        self.in_store: set[bytes] = set()
        # called with the hashes of blocks that have copies from now on
        self.told: Callable[[list[bytes]], None] = _nobody_listens

    @property
    def warm_blocks(self) -> int:
        return len(self._warm)

    @property
    def cold_blocks(self) -> int:
        return len(self._cold)

    @property
    def room(self) -> int:
        return self.warm_capacity - self._held

    @property
    def has_any(self) -> bool:
        return bool(self._warm or self._cold)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._warm or block_hash in self._cold

    def warm(self, block_hash: bytes) -> Copy | None:
        return self._warm.get(block_hash)

    def all_warm(self, hashes: Iterable[bytes]) -> list[Copy | None]:
        return list(map(self._warm.get, hashes))

    def still_found(self, copies: Iterable[Copy]) -> list[Copy]:
        warm = self._warm.get
        return [copy for copy in copies if warm(copy.block_hash) is copy]

    def is_cold(self, block_hash: bytes) -> bool:
        return block_hash in self._cold

    def hashes_of(self, keys: Iterable[int]) -> list[bytes | None]:
        """Return the full hashes of the blocks with copies among ``keys``, which advice uses."""
        return list(map(self._hashes.get, keys))

    def warm_hashes(self) -> list[bytes]:
        """Return the blocks in memory, the first to go first; safe to call from another thread."""
        return list(self._order)

    def cold_hashes(self) -> list[bytes]:
        """Return the blocks on disk, least recently used first; safe from another thread."""
        return list(self._cold)

    def run(self, hashes: Sequence[bytes]) -> int:
        """Return how many of ``hashes``, from the first on without a gap, can be loaded now."""
        warm, reads = self._warm, 0
        if all(map(warm.__contains__, hashes)):
            return len(hashes)
        for count, block_hash in enumerate(hashes):
            if block_hash in warm:
                continue
            reads += 1
            if reads > self.room or not (block_hash in self._cold or block_hash in self.in_store):
                return count
        return len(hashes)

    def begin(self, block_hash: bytes, may_demote: bool = True) -> Copy:
        """Begin a copy: pinned, and not found before ``complete_all``; there must be ``room``."""
        (copy,) = self.begin_all([block_hash], repeat(may_demote))
        return copy

    def begin_all(self, hashes: Sequence[bytes], may_demote: Iterable[bool]) -> list[Copy]:
        """Begin copies; there must be ``room`` for all."""
        assert len(hashes) <= self.room
        first = self._next + 1
        self._held += len(hashes)
        self._next += len(hashes)
        numbers = range(first, self._next + 1)
        return list(map(Copy, numbers, hashes, repeat(self._era), may_demote, repeat(1)))

    def complete_all(self, copies: Sequence[Copy]) -> list[bytes]:
        """Note that the bytes are there; returns the hashes that are found from now on."""
        warm, era, new = self._warm, self._era, dict[bytes, Copy]()
        for copy in copies:
            copy.pins -= 1
            block_hash = copy.block_hash
            if copy.era != era or block_hash in warm or block_hash in new:
                self.abandon(copy)
            else:
                new[block_hash] = copy
        completed = list(new)
        warm.update(new)
        self._order.add_all(completed)
        if self.cold_capacity:
            cold, named = self._cold, self.voided.named
            named += [
                (copy.id, each)
                for each, copy in new.items()
                if copy.may_demote and each not in cold
            ]
        self._hashes.update(zip(keys_of(completed), completed, strict=True))
        self.told(completed)
        return completed

    def holds(self, copy: Copy) -> bool:
        """Whether the copy's bytes are what its hash says: nothing was cleared since it began."""
        return copy.era == self._era

    def abandon(self, copy: Copy) -> None:
        """Free the memory of a copy that is not found, or not any more."""
        self._held -= 1
        self.voided.released.append(copy.id)

    def used(self, hashes: Sequence[bytes]) -> None:
        """Note that the pool uses this chain; on disk, its tail is dropped before its head."""
        self._order.used(hashes)
        for block_hash in reversed(hashes if self._cold else ()):
            if block_hash in self._cold:
                self._cold.move_to_end(block_hash)

    def leaves(self, block_hash: bytes) -> None:
        """Note that the pool lost this block, or is about to: its copy is needed now."""
        self._order.leaves(block_hash)

    def all_leave(self, hashes: Iterable[bytes]) -> None:
        """Note the same of blocks, in this order."""
        self._order.all_leave(hashes)

    def stands_twice(self, block_hash: bytes) -> bool:
        """Tell whether the block is in use in the pool too, as far as the directory knows."""
        return self._order.stands_twice(block_hash)

    def victims(self, count: int, first: Iterable[bytes]) -> list[Copy]:
        """Choose copies in memory to give up or demote; ``first`` is advice, see ``CopyOrder``."""
        found: dict[bytes, Copy] = {}
        warm = self._warm
        for block_hash in self._order.first(first) if count > 0 else ():
            copy = warm.get(block_hash)
            if copy is not None and not copy.pins:
                found[block_hash] = copy
                if len(found) == count:
                    break
        return list(found.values())

    def drop(self, copy: Copy) -> None:
        """Give up a complete copy; its memory is free once the jobs that use it are done."""
        if self._warm.get(copy.block_hash) is copy:
            self.drop_all([copy])

    def drop_all(self, copies: Sequence[Copy]) -> list[bytes]:
        """Give up complete copies, all of which are found; see ``drop``. Returns their hashes."""
        hashes = [copy.block_hash for copy in copies]
        self.lost += len(hashes)
        deque(map(self._warm.pop, hashes), maxlen=0)
        self._order.discard_all(hashes)
        cold = self._cold
        gone = [each for each in hashes if each not in cold] if cold else hashes
        deque(map(self._hashes.pop, keys_of(gone), repeat(None)), maxlen=0)
        unused = [copy.id for copy in copies if not copy.pins]
        self._held -= len(unused)
        self.voided.released += unused
        return hashes

    def unpin(self, copy: Copy) -> None:
        self.unpin_all((copy,))

    def unpin_all(self, copies: Iterable[Copy]) -> None:
        warm = self._warm.get
        for copy in copies:
            copy.pins = pins = copy.pins - 1
            if not pins and warm(copy.block_hash) is not copy:
                self.abandon(copy)

    def add_cold(self, block_hash: bytes) -> None:
        """Note that a record is complete on every worker's disk."""
        self._cold[block_hash] = None
        self._hashes[key_of(block_hash)] = block_hash

    def drop_cold(self, block_hash: bytes) -> None:
        if block_hash in self._cold:
            self.lost += 1
            del self._cold[block_hash]
            self._forget_key(block_hash)
        self.voided.erased.append(block_hash)

    def oldest_cold(self, count: int) -> list[bytes]:
        return [block_hash for block_hash, _ in zip(self._cold, range(count), strict=False)]

    def clear(self) -> None:
        """Give up everything: the blocks' bytes no longer follow from their hashes."""
        self._era += 1
        self.voided.cleared = True
        self.in_store.clear()
        self.drop_all(list(self._warm.values()))
        for block_hash in list(self._cold):
            self.drop_cold(block_hash)

    def _forget_key(self, block_hash: bytes) -> None:
        if block_hash not in self:
            self._hashes.pop(key_of(block_hash), None)

    def check_integrity(self) -> None:
        """Assert the invariants; for tests."""
        assert 0 <= self._held <= self.warm_capacity
        assert len(self._warm) <= self._held
        assert set(self._order) == self._warm.keys()
        assert len(self._order) == len(self._warm)
        assert len(self._cold) <= self.cold_capacity
        assert {key_of(h) for h in (*self._warm, *self._cold)} == self._hashes.keys()
        assert all(copy.block_hash == h for h, copy in self._warm.items())


def all_leave(directory: CopyDirectory, full_hashes: Sequence[bytes]) -> None:
    if directory.holds_twice():
        directory.all_leave(filter(None, directory.hashes_of(keys_in_pool(full_hashes))))
