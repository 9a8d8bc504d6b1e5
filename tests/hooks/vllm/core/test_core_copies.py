"""The compiled record of copies does what the Python one does, whatever happens."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from kvgraph.graph.types import as_keys
from kvgraph.hooks.keys import key_of
from kvgraph.hooks.tiers.directory import CopyDirectory, Marks

pytest.importorskip("kvgraph._engine", reason="there is no compiled core in this installation")

HASHES = [random.Random(number).randbytes(32) for number in range(24)]


def named(answer: Any) -> Any:
    """An answer with numbers in place of copies."""
    if isinstance(answer, (list, tuple)):
        return [named(each) for each in answer]
    return (answer.id, answer.pins) if hasattr(answer, "pins") else answer


class Both:
    """A directory of each kind, of which everything is asked alike."""

    def __init__(self, plain: bool, cold: int) -> None:
        self.pair = [CopyDirectory(9, cold, plain, compiled) for compiled in (False, True)]
        self.begun: list[list[Any]] = []
        self.pinned: list[list[Any]] = []

    def ask(self, name: str, *args: Any) -> Any:
        """What both answer."""
        one, other = [getattr(each, name)(*args) for each in self.pair]
        assert named(one) == named(other), name
        return one

    def step(self, rng: random.Random) -> None:
        """One of the calls that an engine makes."""
        some = rng.sample(HASHES, rng.randrange(8))
        match rng.randrange(10):
            case 0:
                count = min(len(some), self.pair[0].room)
                flags = (
                    [rng.random() < 0.7 for _ in range(count)] if rng.random() < 0.5 else (True,)
                )
                made = [each.begin_all(some[:count], flags) for each in self.pair]
                assert named(made[0]) == named(made[1])
                self.begun += [list(both) for both in zip(*made, strict=True)]
            case 1:
                both = [self.begun.pop() for _ in range(rng.randrange(1 + len(self.begun)))]
                done = [
                    each.complete_all([pair[at] for pair in both])
                    for at, each in enumerate(self.pair)
                ]
                assert done[0] == done[1]
            case 2:
                found = [each.pinned(some) for each in self.pair]
                assert named(found[0]) == named(found[1])
                held = [list(both) for both in zip(*found, strict=True) if both[0] is not None]
                self.pinned += held
            case 3:
                both = [self.pinned.pop() for _ in range(rng.randrange(1 + len(self.pinned)))]
                for at, each in enumerate(self.pair):
                    each.unpin_all([pair[at] for pair in both])
            case 4:
                self.ask("used", some)
            case 5:
                self.ask("all_leave", some)
                self.ask("all_leave_pool", [each + bytes(4) for each in some[:2]])
            case 6:
                found = [each.victims(rng_count, some) for each in self.pair
                         for rng_count in [len(some)]]  # fmt: skip
                assert named(found[0]) == named(found[1])
                dropped = [each.drop_all(copies)
                           for each, copies in zip(self.pair, found, strict=True)]  # fmt: skip
                assert dropped[0] == dropped[1]
            case 7 if self.begun:
                for each, copy in zip(self.pair, self.begun.pop(), strict=True):
                    each.abandon(copy)
            case 8 if self.pair[0].cold_capacity > self.pair[0].cold_blocks and some:
                self.ask("add_cold", some[0])
            case 9 if rng.random() < 0.1:
                self.ask("clear")

    def look_at(self, rng: random.Random) -> None:
        """Some blocks are about to leave."""
        chain, keys = rng.choices(HASHES, k=rng.randrange(12)), list(map(key_of, HASHES))
        ids = np.array(rng.choices(range(9), k=len(chain)), dtype=np.int64)
        held = dict(zip(ids.tolist(), map(key_of, chain), strict=True))
        named = [held.get(id, 1) if rng.random() < 0.6 else rng.choice(keys) for id in range(9)]
        said = [frozenset(rng.choices(keys, k=rng.randrange(4))) for _ in range(2)]
        begun = dict.fromkeys(rng.choices(keys, k=rng.randrange(4)), rng.choice((None, 3)))
        passed = [np.zeros(9, dtype=bool) for _ in self.pair]
        under_way, answers = [dict(begun) for _ in self.pair], list[Any]()
        advised = rng.random() < 0.8
        for each, seen, known in zip(self.pair, passed, under_way, strict=True):
            marks = Marks(as_keys(named), seen, *said) if advised else None
            full = [one + bytes(4) for one in chain]
            answers.append([list(one) for one in each.lacking(full, ids, marks, known, 40)])
        assert answers[0] == answers[1]
        assert under_way[0] == under_way[1]
        if len(set(ids.tolist())) == len(ids):  # else the last look at a block counts, or the first
            assert passed[0].tolist() == passed[1].tolist()

    def compare(self, rng: random.Random) -> None:
        """All that can be asked."""
        chain = rng.choices(HASHES, k=9)
        for name, argument in (
            ("run", chain), ("run", tuple(chain)), ("all_warm", chain), ("warm", chain[0]),
            ("hashes_of", [key_of(each) for each in chain]), ("stands_twice", chain[0]),
        ):  # fmt: skip
            self.ask(name, argument)
        self.look_at(rng)
        for name in ("warm_hashes", "cold_hashes", "holds_twice", "check_integrity"):
            self.ask(name)
        one, other = self.pair
        assert (one.room, one.lost, one.warm_blocks) == (other.room, other.lost, other.warm_blocks)
        assert all((each in one) == (each in other) for each in chain)
        assert one.voided.take() == other.voided.take()


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("cold", [0, 4])
def test_both_records_of_copies_say_the_same(plain: bool, cold: int) -> None:
    for seed in range(12):
        rng, both = random.Random(seed), Both(plain, cold)
        for _ in range(250):
            both.step(rng)
            both.compare(rng)


def test_a_long_chain_is_looked_up_in_parts() -> None:
    rng, directory = random.Random(3), CopyDirectory(5000, compiled=True)
    chain = [rng.randbytes(32) for _ in range(3000)]
    directory.complete_all(directory.begin_all(chain, (True,)))
    assert directory.run(chain) == 3000
    directory.drop_all([directory.warm(chain[2_500])])
    assert directory.run(chain) == 2_500
    directory.used(chain)
    assert directory.warm_hashes() == [*chain[:2_500:-1], *chain[2_499::-1]]


def test_a_copy_is_found_by_its_whole_hash() -> None:
    directory = CopyDirectory(5, compiled=True)
    one, other = b"1" + bytes(31), b"2" + bytes(31)
    first, second = directory.begin_all([one, other], (True,))
    assert directory.complete_all([first, second]) == [one]
    assert directory.run([other]) == 0
    assert other not in directory
    assert directory.voided.take().release == (second.id,), "its memory is free"


def test_what_is_no_copy_or_hash_is_refused() -> None:
    directory, numbers = CopyDirectory(5, compiled=True), np.zeros(1, dtype=np.int64)
    marks = Marks(as_keys([1]), np.zeros(1, dtype=bool), (), ())
    for wrong_call in (
        ([None], numbers, None, {}, 0), ([b"short"], numbers, None, {}, 0),
        ([HASHES[0]], numbers[:0], None, {}, 0), ([HASHES[0]], numbers, (1, 2), {}, 0),
    ):  # fmt: skip
        with pytest.raises(TypeError):
            directory.lacking(*wrong_call)
    with pytest.raises(IndexError):
        directory.lacking([HASHES[0]], numbers + 1, marks, {}, 0)
    for wrong in ([None], [b"short"], [3]):
        with pytest.raises(TypeError):
            directory.begin_all(wrong, (True,))
        with pytest.raises(TypeError):
            directory.complete_all(wrong)
        assert directory.run(wrong) == 0
    (copy,) = CopyDirectory(5, compiled=True).begin_all([HASHES[0]], (True,))
    with pytest.raises(KeyError):
        directory.drop_all([copy])
