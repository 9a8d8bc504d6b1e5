"""Answers of several workers, what transfers cost, and the variables that set the budgets."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from hand_clock import Clock
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from kvgraph.graph.errors import ConfigError
from kvgraph.hooks.keys import key_of
from kvgraph.hooks.settings import (
    COLD_VARIABLE,
    DIRECTORY_VARIABLE,
    WARM_VARIABLE,
    EngineSettings,
    TierSettings,
)
from kvgraph.hooks.tiers.costs import TransferCosts
from kvgraph.hooks.tiers.directory import Copy, CopyDirectory
from kvgraph.hooks.tiers.jobs import JobBook, JobDone, Spill, TierAnswer, TierWork, WorkerStart

MIB = 1 << 20


# Jobs -------------------------------------------------------------------------------------------


def answer(job: int, failed: set[int], seconds: float = 0.0, size: int = 0) -> JobDone:
    return JobDone(job, frozenset(failed), seconds, size)


def test_a_job_is_done_when_every_worker_said_so() -> None:
    book, heard = JobBook(3), list[JobDone]()
    job = Spill(book.number(), (1, 2, 3), (7, 8, 9))
    book.open(job, heard.append)
    assert book.take() == (job,)
    assert book.take() == ()
    book.answer(answer(job.id, {0}, 0.5, 100))
    book.answer(answer(job.id, set(), 0.9, 300))
    assert heard == []
    assert len(book) == 1
    book.answer(answer(job.id, {2}, 0.1, 200))
    assert heard == [answer(job.id, {0, 2}, 0.9, 300)]
    assert len(book) == 0


def test_what_nobody_asked_and_what_is_said_again_changes_nothing() -> None:
    book, heard = JobBook(1), list[JobDone]()
    job = Spill(book.number(), (1,), (1,))
    book.open(job, heard.append)
    book.answer(answer(job.id + 1, set()))
    for _ in range(3):
        book.answer(answer(job.id, set()))
    assert len(heard) == 1


def test_a_job_may_open_the_next() -> None:
    book, order = JobBook(1), list[int]()
    first, second = (Spill(book.number(), (1,), (1,)) for _ in range(2))

    def go_on(done: JobDone) -> None:
        order.append(done.id)
        book.open(second, lambda done: order.append(done.id))

    book.open(first, go_on)
    book.answer(answer(first.id, set()))
    assert book.take() == (first, second)
    book.answer(answer(second.id, set()))
    assert order == [first.id, second.id]


def test_messages_say_whether_there_is_anything_in_them() -> None:
    assert not TierWork()
    assert not TierAnswer()
    assert TierWork(release=(1,))
    assert TierWork(erase=(b"x",))
    starts = (WorkerStart(1, 2, (b"a",)), WorkerStart())
    both = TierAnswer((answer(1, set()),)) + TierAnswer((answer(1, {0}),), starts)
    assert both == TierAnswer((answer(1, set()), answer(1, {0})), starts)
    assert TierWork(disown=True)
    assert TierAnswer(starts=(WorkerStart(),)), "a worker that has nothing is news too"


# Costs ------------------------------------------------------------------------------------------


def test_without_a_sample_a_load_is_tried() -> None:
    costs = Measured()
    assert costs.worth_loading(1, 1 << 40, 1 << 40)


class Measured(TransferCosts):
    """What steps and transfers cost, by a clock that a test moves."""

    def __init__(self) -> None:
        self.time = Clock(100.0)
        super().__init__(self.time)

    def stepped(self, tokens: int, seconds: float) -> None:
        """A step begins and ends."""
        self.step_began(tokens)
        self.time.now += seconds
        self.step_ended()


def learned(tokens_per_s: float, bytes_per_s: float) -> Measured:
    costs = Measured()
    costs.stepped(1000, 1000 / tokens_per_s)
    costs.loaded(round(bytes_per_s), 1.0, from_disk=False)
    return costs


def test_the_faster_way_is_chosen() -> None:
    costs = learned(1000, 100 * MIB)
    assert costs.prefill_tokens_per_s == pytest.approx(1000)
    assert costs.worth_loading(1000, 99 * MIB, 0)
    assert not costs.worth_loading(1000, 101 * MIB, 0)


def test_what_is_under_way_counts() -> None:
    costs = learned(1000, 100 * MIB)
    assert costs.worth_loading(1000, 50 * MIB, 0)
    costs.queued_bytes = 60 * MIB
    assert not costs.worth_loading(1000, 50 * MIB, 0)


def test_the_disk_has_a_speed_of_its_own() -> None:
    costs = learned(1000, 100 * MIB)
    costs.loaded(10 * MIB, 1.0, from_disk=True)
    assert costs.worth_loading(1000, 90 * MIB, 0)
    assert not costs.worth_loading(1000, 0, 11 * MIB)
    assert not costs.worth_loading(1000, 60 * MIB, 5 * MIB), "both ways add up"


def test_a_short_splice_is_not_worth_its_wait() -> None:
    costs = learned(1000, 100 * MIB)
    assert costs.worth_splicing(1, MIB, loads=False), "no splice was measured yet"
    costs.spliced(MIB // 2, 0.001, 0.02)  # too small to say how fast it is
    per_wait = int(0.019 / costs.token_s)
    assert costs.worth_splicing(per_wait + 1, MIB // 2, loads=False)
    assert not costs.worth_splicing(per_wait - 1, MIB // 2, loads=False)
    assert costs.worth_splicing(per_wait - 1, MIB // 2, loads=True), "it waits anyway"
    while not costs.worth_splicing(1, MIB // 2, loads=False):
        pass  # tried once more some day
    costs.splices_always = True
    assert costs.worth_splicing(1, 1 << 40, loads=False)


def test_a_token_costs_what_it_adds_to_a_step() -> None:
    costs = Measured()
    for tokens, seconds in ((4, 0.010), (200, 0.030), (4, 0.010), (100, 0.020)):
        costs.stepped(tokens, seconds)
    assert costs.token_s == pytest.approx(0.0001)
    costs.spliced(MIB, 0.001, 0.006)
    assert costs.worth_splicing(70, MIB, loads=False)
    assert not costs.worth_splicing(50, MIB, loads=False), "though a step of 50 takes 15 ms"


def test_where_tokens_add_nothing_they_are_computed() -> None:
    costs = Measured()
    for tokens in (4, 200):
        costs.stepped(tokens, 0.010)
    assert costs.worth_splicing(100, MIB, loads=False), "no splice was measured yet"
    costs.spliced(MIB, 0.001, 0.002)
    assert not costs.worth_splicing(100, MIB, loads=False)


def test_what_lost_again_and_again_is_tried_once_more() -> None:
    costs = learned(1000, MIB)
    declined = 0
    while not costs.worth_loading(1000, 4 * MIB, 0):
        declined += 1
        assert declined < 1000
    assert declined > 10


def test_steps_that_overlap_are_not_counted_twice() -> None:
    """Two steps of 1 s each are scheduled 0.1 s apart: together they take 2 s."""
    costs = Measured()
    costs.step_began(500)
    costs.time.now += 0.1
    costs.stepped(500, 0.9)
    costs.time.now += 1.0
    costs.step_ended()
    assert costs.prefill_tokens_per_s == pytest.approx(500)
    costs.step_ended()  # told without a beginning
    assert costs.prefill_tokens_per_s == pytest.approx(500)


def test_decode_steps_say_nothing_about_prefill() -> None:
    costs = Measured()
    costs.stepped(4, 1.0)
    assert costs.prefill_tokens_per_s == 0


def test_small_transfers_say_nothing_about_bandwidth() -> None:
    costs = Measured()
    costs.spilled(1000, 5.0)
    assert costs.spill_bytes_per_s == 0
    costs.spilled(4 * MIB, 2.0)
    assert costs.spill_bytes_per_s == 2 * MIB
    costs.spilled(0, 0.0)
    assert costs.spill_bytes_per_s == 2 * MIB


# Settings ---------------------------------------------------------------------------------------


def asked(environment: dict[str, str]) -> TierSettings | None:
    return EngineSettings.read(environment).tiers()


def test_no_variable_no_tiers() -> None:
    assert asked({}) is None
    assert asked({WARM_VARIABLE: "0", "AITHER_KVCACHE_PREFETCH": "nonsense"}) is None


def test_all_variables_reach_the_engine_and_back(tmp_path: Path) -> None:
    settings = asked({
        WARM_VARIABLE: " 1.5 ", COLD_VARIABLE: "20", DIRECTORY_VARIABLE: str(tmp_path),
        "AITHER_KVCACHE_PREFETCH": "0", "AITHER_KVCACHE_SPILL": "ALL",
    })  # fmt: skip
    assert settings == TierSettings(3 << 29, 20 << 30, tmp_path, prefetch=False, spill_all=True)
    assert TierSettings.from_plain(settings.plain()) == settings
    alone = asked({WARM_VARIABLE: "2"})
    assert alone == TierSettings(2 << 30)
    assert TierSettings.from_plain(alone.plain()) == alone


@pytest.mark.parametrize(
    ("variable", "value", "allowed"),
    [
        (WARM_VARIABLE, "much", "GiB from 0 to"),
        (WARM_VARIABLE, "-1", "GiB from 0 to"),
        (WARM_VARIABLE, "nan", "GiB from 0 to"),
        (WARM_VARIABLE, "inf", "GiB from 0 to"),
        (WARM_VARIABLE, "9999999999", "GiB from 0 to"),
        (COLD_VARIABLE, "20 GB", "GiB from 0 to"),
        (COLD_VARIABLE, "20", "go together"),
        (DIRECTORY_VARIABLE, "/somewhere", "go together"),
        ("AITHER_KVCACHE_PREFETCH", "queued", "1 or 0"),
        ("AITHER_KVCACHE_SPILL", "some", "worth, all"),
        (WARM_VARIABLE, "", f"{COLD_VARIABLE} needs {WARM_VARIABLE}"),
    ],
)
def test_a_bad_value_is_named_with_what_is_allowed(variable: str, value: str, allowed: str) -> None:
    disk = {} if value else {COLD_VARIABLE: "1", DIRECTORY_VARIABLE: "/somewhere"}
    with pytest.raises(ConfigError, match=allowed) as caught:
        asked({WARM_VARIABLE: "1", **disk, variable: value})
    assert variable in str(caught.value)


def test_a_store_is_asked_for_what_takes_a_while_to_compute() -> None:
    costs = Measured()
    assert costs.worth_asking(16), "nothing was measured yet"
    costs.prefill_tokens_per_s = 10_000.0
    assert not costs.worth_asking(0)
    assert not costs.worth_asking(400)
    assert costs.worth_asking(600)


def test_a_store_is_read_as_long_as_computing_takes() -> None:
    costs = Measured()
    assert costs.store_limit_s(100_000) == 1.0, "nothing was measured yet"
    costs.prefill_tokens_per_s = 10_000.0
    assert costs.store_limit_s(100_000) == 10.0
    assert costs.store_limit_s(16) == 0.25


def test_a_store_that_turned_slow_is_not_loaded_from() -> None:
    costs = Measured()
    costs.prefill_tokens_per_s = 1000.0
    costs.loaded(10 * MIB, 10.0, from_disk=False, from_store=True)
    assert costs.worth_loading(1000, MIB, 0), "memory is another matter"
    assert not costs.worth_loading(1000, 0, 0, 10 * MIB)


def test_idle_steps_whose_end_nobody_tells_of_shift_no_measurement() -> None:
    costs = Measured()
    for _ in range(3):
        costs.step_began(0)
        costs.time.now += 0.01
    costs.stepped(1000, 1.0)
    assert costs.prefill_tokens_per_s == pytest.approx(1000)


WARM, COLD = 5, 3
BLOCKS = st.integers(0, 9)


def name(number: int) -> bytes:
    return number.to_bytes(32, "big")


class DirectoryModel(RuleBasedStateMachine):
    """Two sets of hashes and a list of open jobs say what the directory must say."""

    compiled = False

    def __init__(self) -> None:
        super().__init__()
        self.directory = CopyDirectory(WARM, COLD, compiled=self.compiled)
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
        self.directory.unpin_all([copy])
        if self.given_up(copy) and copy not in self.pinned:
            self.release(copy)

    @precondition(lambda self: self.warm)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self._drop(self.warm[data.draw(st.sampled_from(sorted(self.warm)))])

    def _drop(self, copy: Copy) -> None:
        self.directory.drop_all([copy])
        del self.warm[copy.block_hash]
        if copy not in self.pinned:
            self.release(copy)

    @rule(count=st.integers(0, 7), first=st.lists(BLOCKS, max_size=4))
    def demote(self, count: int, first: list[int]) -> None:
        victims = self.directory.victims(count, map(name, first))
        assert len({copy.id for copy in victims}) == len(victims) <= count
        twice = filter(self.directory.stands_twice, self.directory.warm_hashes())
        asked = [self.warm[h] for h in (*twice, *map(name, first)) if h in self.warm]
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


class CompiledDirectoryModel(DirectoryModel):
    """The same of the directory that has its copies in the compiled core."""

    compiled = True


if find_spec("kvgraph._engine") is not None:
    TestCompiledDirectoryModel = CompiledDirectoryModel.TestCase
    TestCompiledDirectoryModel.settings = TestDirectoryModel.settings


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
