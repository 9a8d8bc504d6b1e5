"""The directory of copies against a plain model: found only when complete, never over capacity."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from kvgraph.hooks.keys import key_of
from kvgraph.hooks.tiers.directory import Copy, CopyDirectory

WARM, COLD = 5, 3
BLOCKS = st.integers(0, 9)


def name(number: int) -> bytes:
    return number.to_bytes(32, "big")


class DirectoryModel(RuleBasedStateMachine):
    """Two sets of hashes and a list of open jobs say what the directory must say."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = CopyDirectory(WARM, COLD)
        self.warm: dict[bytes, Copy] = {}
        self.cold: list[bytes] = []
        self.begun: list[tuple[Copy, int]] = []
        self.pinned: list[Copy] = []
        self.released: set[int] = set()
        self.erased: list[bytes] = []
        self.era = 0

    def release(self, copy: Copy) -> None:
        assert copy.id not in self.released
        self.released.add(copy.id)

    def given_up(self, copy: Copy) -> bool:
        return self.warm.get(copy.block_hash) is not copy

    @precondition(lambda self: self.directory.room)
    @rule(block=BLOCKS)
    def begin(self, block: int) -> None:
        self.begun.append((self.directory.begin(name(block)), self.era))

    @precondition(lambda self: self.begun)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        copy, era = self.begun.pop(data.draw(st.integers(0, len(self.begun) - 1)))
        counts = era == self.era and copy.block_hash not in self.warm
        assert bool(self.directory.complete_all([copy])) is counts
        if counts:
            self.warm[copy.block_hash] = copy
        else:
            self.release(copy)

    @precondition(lambda self: self.begun)
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        copy, _ = self.begun.pop(data.draw(st.integers(0, len(self.begun) - 1)))
        self.directory.abandon(copy)
        self.release(copy)

    @rule(block=BLOCKS)
    def pin(self, block: int) -> None:
        copy = self.directory.warm(name(block))
        if copy is not None:
            copy.pins += 1
            self.pinned.append(copy)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        copy = self.pinned.pop(data.draw(st.integers(0, len(self.pinned) - 1)))
        self.directory.unpin(copy)
        if self.given_up(copy) and copy not in self.pinned:
            self.release(copy)

    @precondition(lambda self: self.warm)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self._drop(self.warm[data.draw(st.sampled_from(sorted(self.warm)))])

    def _drop(self, copy: Copy) -> None:
        self.directory.drop(copy)
        del self.warm[copy.block_hash]
        if copy not in self.pinned:
            self.release(copy)

    @rule(count=st.integers(0, 7), first=st.lists(BLOCKS, max_size=4))
    def demote(self, count: int, first: list[int]) -> None:
        victims = self.directory.victims(count, map(name, first))
        assert len({copy.id for copy in victims}) == len(victims) <= count
        asked = [self.warm[h] for h in map(name, first) if h in self.warm]
        asked = [copy for copy in dict.fromkeys(asked) if copy not in self.pinned]
        assert victims[: len(asked)] == asked[:count]
        for copy in victims:
            assert not copy.pins
            if len(self.cold) < COLD and copy.block_hash not in self.cold:
                self.directory.add_cold(copy.block_hash)
                self.cold.append(copy.block_hash)
            self._drop(copy)

    @rule(block=BLOCKS)
    def drop_cold(self, block: int) -> None:
        self.directory.drop_cold(name(block))
        self.erased.append(name(block))
        if name(block) in self.cold:
            self.cold.remove(name(block))

    @rule(chain=st.lists(BLOCKS, unique=True, max_size=6))
    def touch(self, chain: list[int]) -> None:
        hashes = [name(block) for block in chain]
        self.directory.used(hashes)
        used = [h for h in reversed(hashes) if h in self.warm]
        assert [h for h in self.directory.warm_hashes() if h in used] == used
        assert all(self.directory.stands_twice(h) for h in used)
        self.cold = [h for h in self.cold if h not in hashes] + [
            h for h in reversed(hashes) if h in self.cold
        ]

    @rule()
    def clear(self) -> None:
        self.directory.clear()
        self.era += 1
        self.erased += self.cold
        for copy in self.warm.values():
            if copy not in self.pinned:
                self.release(copy)
        self.warm, self.cold = {}, []

    @rule(chain=st.lists(BLOCKS, max_size=8))
    def run(self, chain: list[int]) -> None:
        count = self.directory.run([name(block) for block in chain])
        reads = [name(b) for b in chain[:count] if name(b) not in self.warm]
        assert all(h in self.cold for h in reads)
        assert len(reads) <= self.directory.room
        if count < len(chain):
            stop = name(chain[count])
            assert stop not in self.warm
            assert stop not in self.cold or len(reads) == self.directory.room

    @rule()
    def tell_workers(self) -> None:
        told, erased, *_ = self.directory.voided.take()
        assert len(set(told)) == len(told)
        assert set(told) == self.released
        assert list(erased) == self.erased
        open_copies = {copy.id for copy, _ in self.begun} | {copy.id for copy in self.pinned}
        assert not open_copies & set(told), "a job still has the memory of a released copy"
        assert not {copy.id for copy in self.warm.values()} & set(told)
        self.released, self.erased = set(), []

    @invariant()
    def agrees(self) -> None:
        self.directory.check_integrity()
        assert set(self.directory.warm_hashes()) == self.warm.keys()
        assert self.directory.cold_hashes() == self.cold
        assert self.directory.oldest_cold(2) == self.cold[:2]
        given_up = {copy.id for copy in self.pinned if self.given_up(copy)}
        held = len(self.warm) + len(self.begun) + len(given_up)
        assert self.directory.room == WARM - held
        for number in range(10):
            block, kept = name(number), name(number) in self.warm or name(number) in self.cold
            assert (block in self.directory) is kept
            assert self.directory.hashes_of([key_of(block)]) == [block if kept else None]


TestDirectoryModel = DirectoryModel.TestCase
TestDirectoryModel.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_a_chain_is_demoted_tail_first() -> None:
    directory = CopyDirectory(8, 8)
    chain = [name(number) for number in range(5)]
    for block_hash in chain:
        directory.complete_all([directory.begin(block_hash)])
    directory.used(chain)
    assert [copy.block_hash for copy in directory.victims(3, ())] == chain[:1:-1]


def test_no_copy_is_begun_without_room() -> None:
    directory = CopyDirectory(1, 0)
    directory.begin(name(1))
    assert directory.room == 0
    with pytest.raises(AssertionError):
        directory.begin(name(2))
