"""A worker's mover on real memory: bytes come back equal, and whatever fails is reported."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from kvgraph.hooks import threads
from kvgraph.hooks.tiers import lanes as record_lane
from kvgraph.hooks.tiers import mover
from kvgraph.hooks.tiers.costs import TransferCosts
from kvgraph.hooks.tiers.jobs import (
    Demote,
    Job,
    JobDone,
    Load,
    Share,
    Spill,
    TierWork,
    WorkerStart,
)
from kvgraph.hooks.tiers.lanes import RECORD_KEY_BYTES, AnswerWatch, TransferLane
from kvgraph.hooks.tiers.ledger import TierLedger
from kvgraph.hooks.tiers.mover import TierMover
from kvgraph.kernels import ops
from kvgraph.kernels.arena import Arena
from kvgraph.kernels.disk import DiskTier
from kvgraph.kernels.layout import Blocks, new_memory
from kvgraph.kernels.layout_engines import cpu_layout

LAYOUT = cpu_layout("vec", 2, 12, 2, 32, 32)
SIZE = LAYOUT.block_bytes
PATIENCE_S = 20.0


class SlowDisk(DiskTier):
    """Reads and writes wait for leave."""

    def __init__(self, path: Path, capacity: int) -> None:
        super().__init__(path, SIZE, capacity, "slow")
        self.leave = threading.Event()

    def write(self, key: bytes, record: Any) -> bool:
        return self.leave.wait(PATIENCE_S) and super().write(key, record)

    def read(self, key: bytes, into: Any) -> bool:
        return self.leave.wait(PATIENCE_S) and super().read(key, into)


class Bench:
    """A mover, the engine's memory, and the scheduler's part of the talk."""

    def __init__(
        self,
        records: int = 6,
        disk: DiskTier | None = None,
        hash_bytes: int = RECORD_KEY_BYTES,
        watch: AnswerWatch | None = None,
    ) -> None:
        self.cache = new_memory(LAYOUT)
        self.cache.memory.copy_(torch.randn(len(self.cache.memory)))
        self.arena = Arena(LAYOUT.record(records), pin=False)
        self.mover = TierMover(self.cache, self.arena, disk, hash_bytes, watch)
        self.open = True

    def bytes_of(self, block: int) -> bytes:
        layers = self.cache.memory.view(2, 12, -1)[:, block]
        return layers.contiguous().view(torch.uint8).numpy().tobytes()

    def overwrite(self, block: int) -> None:
        self.cache.memory.view(2, 12, -1)[:, block] = -1

    def give(self, *jobs: Job, **rest: Any) -> None:
        self.mover.submit(TierWork(jobs, **rest))

    def close(self) -> None:
        if self.open:
            self.open = False
            self.mover.close()

    def wait(self, count: int = 1, gives_up: bool = False) -> list[JobDone]:
        done, deadline = list[JobDone](), time.monotonic() + PATIENCE_S
        while len(done) < count:
            assert time.monotonic() < deadline, "an answer is missing"
            if gives_up:
                self.mover.lanes.give_up_on_overdue()
            done += self.mover.answers.take_answer().done
            time.sleep(0.001)
        return done

    def rest(self) -> None:
        """Until the disk's thread holds no copy any more, which is heard before the next order."""
        while self.mover.lanes.disk.copies:
            self.do(Spill(99, (), ()))

    def do(self, *jobs: Job, **rest: Any) -> list[JobDone]:
        self.give(*jobs, **rest)
        return self.wait(len(jobs))


NewBench = Callable[..., Bench]


@pytest.fixture
def new_bench() -> Iterator[NewBench]:
    with contextlib.ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(closing(Bench(*args, **options)))


@pytest.fixture
def bench(new_bench: NewBench) -> Bench:
    """One without a disk."""
    return new_bench()


@pytest.fixture
def disk(tmp_path: Path) -> DiskTier:
    return new_disk(tmp_path)


def load(number: int, copies: tuple[int, ...], blocks: tuple[int, ...], **options: Any) -> Load:
    return Load(number, copies, blocks, options.get("from_disk", {}), options.get("request"))


def key(number: int) -> bytes:
    return number.to_bytes(RECORD_KEY_BYTES, "big")


def new_disk(tmp_path: Path, capacity: int = 6) -> DiskTier:
    return DiskTier(tmp_path / "tier", SIZE, capacity, "model")


# Memory -----------------------------------------------------------------------------------------


def record_of(disk: DiskTier, name: bytes) -> bytes:
    into = bytearray(SIZE)
    assert disk.read(name, into)
    return bytes(into)


def test_spilled_overwritten_and_loaded_elsewhere_the_bytes_are_equal(bench: Bench) -> None:
    before = [bench.bytes_of(block) for block in range(12)]
    (done,) = bench.do(Spill(1, (3, 7, 5), (11, 12, 13)))
    assert done.failed == frozenset()
    assert done.bytes == 3 * SIZE
    for block in (3, 7, 5):
        bench.overwrite(block)
    (done,) = bench.do(load(2, (13, 11), (0, 7), request="r"))
    assert (done.id, done.failed, done.bytes) == (2, frozenset(), 2 * SIZE)
    assert bench.bytes_of(0) == before[5]
    assert bench.bytes_of(7) == before[3]
    untouched = [block for block in range(12) if block not in (0, 3, 5, 7)]
    assert [bench.bytes_of(b) for b in untouched] == [before[b] for b in untouched]
    assert bench.mover.answers.take_loaded() == ({"r"}, set())
    assert bench.mover.answers.take_loaded() == (set(), set())


def test_released_memory_is_used_again(new_bench: NewBench) -> None:
    bench = new_bench(records=2)
    for round_ in range(5):
        copies = (2 * round_ + 1, 2 * round_ + 2)
        gone = tuple(copy - 2 for copy in copies) if round_ else ()
        (done,) = bench.do(Spill(round_ + 1, (1, 2), copies), release=gone)
        assert not done.failed
    (done,) = bench.do(Spill(6, (1,), (11,)), release=(9, 10, 77))
    assert bench.arena.used == 1  # what that last spill took
    bench.arena.check_integrity()


def test_a_full_arena_fails_the_spill_and_nothing_else(
    new_bench: NewBench, caplog: pytest.LogCaptureFixture
) -> None:
    bench = new_bench(records=3)
    caplog.set_level(logging.WARNING)
    first, second, third = bench.do(
        Spill(1, (0, 1), (1, 2)), Spill(2, (2, 3), (3, 4)), Spill(3, (4, 5), (5, 6))
    )
    by_id = {done.id: done for done in (first, second, third)}
    assert by_id[1].failed == frozenset()
    assert by_id[2].failed == by_id[3].failed == {0, 1}
    assert by_id[2].bytes == 0
    assert len(caplog.records) == 1, "the reason is logged once"
    assert "records asked for" in caplog.text
    (done,) = bench.do(Spill(4, (6,), (7,)), release=(3, 4, 5, 6))
    assert not done.failed


@pytest.mark.parametrize(
    ("request_", "told"), [("r", ({"r"}, {5, 6})), (None, (set(), set()))], ids=["load", "prefetch"]
)
def test_an_unknown_copy_fails_the_whole_load_and_a_request_is_told(
    bench: Bench, request_: str | None, told: tuple[set[str], set[int]]
) -> None:
    bench.do(Spill(1, (3,), (1,)))
    before = [bench.bytes_of(block) for block in range(12)]
    (done,) = bench.do(load(2, (1, 99), (5, 6), request=request_))
    assert done.failed == {0, 1}
    assert bench.mover.answers.take_loaded() == told
    assert [bench.bytes_of(block) for block in range(12)] == before


@pytest.mark.parametrize("operation", ["spill", "load"])
def test_a_transfer_that_fails_half_way(
    bench: Bench, operation: str,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    real = getattr(ops, operation)
    bench.do(Spill(1, (3, 4), (1, 2)))

    def half(source: Blocks, target: Blocks) -> None:
        real(*(Blocks(each.kv, each.numbers[:1]) for each in (source, target)))
        raise RuntimeError("SECRET the bus is gone")

    monkeypatch.setattr(ops, operation, half)
    jobs = {
        "spill": [Spill(2, (5, 6), (3, 4)), Spill(3, (7,), (5,))],
        "load": [load(2, (1, 2), (8, 9), request="r"), load(3, (1,), (10,), request="s")],
    }
    done = bench.do(*jobs[operation])
    assert [d.failed for d in done] == [{0, 1}, {0}]
    (line,) = caplog.messages
    assert "RuntimeError" in line
    assert "SECRET" not in line, "a message may quote what it choked on"
    if operation == "load":
        assert bench.mover.answers.take_loaded() == ({"r", "s"}, {8, 9, 10})
    monkeypatch.undo()
    (again,) = bench.do(load(4, (2,), (11,)))
    assert not again.failed
    assert bench.bytes_of(11) == bench.bytes_of(4)


def test_a_device_that_takes_no_orders_fails_them(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: torch.device) -> None:
        raise RuntimeError("the driver is gone")

    monkeypatch.setattr(mover, "mark", broken)
    spilled, loaded = bench.do(Spill(1, (3,), (1,)), load(2, (1,), (5,), request="r"))
    assert spilled.failed == loaded.failed == {0}
    assert bench.mover.answers.take_loaded() == ({"r"}, {5})


# Lanes ------------------------------------------------------------------------------------------


def test_what_a_load_overwrites_is_copied_before_it_and_waits_for_no_spill(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, leave = ops.spill, threading.Event()
    old, new = bench.bytes_of(9), bench.bytes_of(3)
    bench.do(Spill(1, (3,), (1,)))

    def slow(blocks: Blocks, records: Blocks) -> None:
        if blocks.numbers.tolist() == [4]:
            assert leave.wait(PATIENCE_S)
        real(blocks, records)

    monkeypatch.setattr(ops, "spill", slow)
    saved, loaded = Spill(3, (9,), (3,), overwritten=True), load(4, (1,), (9,), request="r")
    bench.give(Spill(2, (4,), (2,)), saved, loaded)
    assert [(done.id, done.failed) for done in bench.wait(2)] == [(3, set()), (4, set())]
    assert bench.bytes_of(9) == new
    assert bench.mover.answers.take_loaded() == ({"r"}, set())
    leave.set()
    (done,) = bench.wait()
    assert (done.id, done.failed) == (2, set())
    bench.do(load(5, (3,), (10,)))
    assert bench.bytes_of(10) == old


def test_of_a_step_loads_are_begun_first(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    lanes, real = list[TransferLane](), TransferLane.put
    bench.do(Spill(1, (3,), (1,)))

    def put(lane: TransferLane, *order: Any) -> None:
        lanes.append(lane)
        real(lane, *order)

    monkeypatch.setattr(TransferLane, "put", put)
    bench.do(load(2, (1,), (11,)))
    bench.do(Spill(3, (4,), (2,)), load(4, (1,), (9,)), Spill(5, (5,), (3,)), load(6, (1,), (8,)))
    loads, spills = lanes[0], lanes[-1]
    assert loads is not spills
    assert lanes == [loads, loads, loads, spills, spills]


def test_less_memory_than_was_asked_for_is_said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = Arena(LAYOUT.record(6), pin=False)
    monkeypatch.setattr(arena, "problem", "67108864 bytes cannot be page-locked: out of memory")
    TierMover(new_memory(LAYOUT), arena).close()
    assert "host memory for 6 copies only" in caplog.text
    assert "memlock" in caplog.text


# Disk -------------------------------------------------------------------------------------------


def test_a_copy_is_demoted_and_read_again(new_bench: NewBench, disk: DiskTier) -> None:
    bench = new_bench(records=3, disk=disk)
    before = {block: bench.bytes_of(block) for block in (3, 4)}
    bench.do(Spill(1, (3, 4), (1, 2)))
    (demoted,) = bench.do(Demote(2, (1, 2), (key(33), key(44))))
    assert not demoted.failed
    bench.overwrite(3)
    # One record is still in memory, the other comes from the disk; the job has both.
    (done,) = bench.do(load(3, (1, 5), (8, 9), from_disk={1: key(44)}, request="r"), release=(2,))
    assert not done.failed
    assert bench.bytes_of(8) == before[3]
    assert bench.bytes_of(9) == before[4]
    (kept,) = bench.do(load(4, (5,), (10,)))
    assert not kept.failed, "what was read from the disk is a copy in memory now"
    assert bench.bytes_of(10) == before[4]


def test_what_is_erased_is_not_read_again(new_bench: NewBench, disk: DiskTier) -> None:
    bench = new_bench(disk=disk)
    bench.do(Spill(1, (3,), (1,)))
    bench.do(Demote(2, (1,), (key(33),)))
    (done,) = bench.do(
        load(3, (2,), (8,), from_disk={0: key(33)}, request="r"), erase=(key(33), key(77))
    )
    assert done.failed == {0}
    assert bench.mover.answers.take_loaded() == ({"r"}, {8})


def test_what_is_in_memory_at_the_end_is_written_and_a_later_process_finds_it(
    new_bench: NewBench, tmp_path: Path
) -> None:
    bench = new_bench(disk=new_disk(tmp_path))
    before = bench.bytes_of(5)
    bench.do(Spill(1, (3, 4, 5), (1, 2, 3)))
    bench.do(Demote(2, (1,), (key(33),)), named=((1, key(33)), (3, key(55))))
    bench.close()
    again = new_bench(disk=new_disk(tmp_path))
    (start,) = again.mover.answers.take_answer().starts
    assert set(start.on_disk) == {key(33), key(55)}, "nobody said that the third is whole"
    (done,) = again.do(load(3, (9,), (8,), from_disk={0: key(55)}))
    assert not done.failed
    assert again.bytes_of(8) == before


def test_at_the_end_nothing_is_written_that_was_given_up_or_is_of_unknown_weights(
    new_bench: NewBench, tmp_path: Path
) -> None:
    bench = new_bench(disk=new_disk(tmp_path))
    bench.do(Spill(1, (3, 4), (1, 2)), named=((1, key(33)), (2, key(44))))
    bench.do(Spill(2, (5,), (3,)), release=(1,))
    bench.close()
    again = new_bench(disk=(disk := new_disk(tmp_path)))
    assert set(disk) == {key(44)}
    again.do(Spill(1, (3,), (1,)), named=((1, key(33)),))
    again.do(Spill(2, (4,), (2,)), disown=True, named=((1, key(33)),))
    again.give(named=((2, key(55)),))
    again.close()
    assert set(disk) == {key(44)}


def test_the_end_waits_for_a_slow_disk_only_so_long(
    new_bench: NewBench, disk: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest copies first: of a chain, the root."""
    bench, write, written = new_bench(disk=disk), disk.write, list[bytes]()

    def slow(name: bytes, record: Any) -> bool:
        written.append(name)
        time.sleep(0.2)
        return write(name, record)

    monkeypatch.setattr(disk, "write", slow)
    monkeypatch.setattr(record_lane, "LAST_WRITES_S", 0.1)
    bench.do(Spill(1, (3, 4, 5), (1, 2, 3)), named=tuple((n, key(n)) for n in (1, 2, 3)))
    bench.close()
    assert written == [key(3)]


def test_records_are_announced_at_the_start_once(new_bench: NewBench, disk: DiskTier) -> None:
    disk.write(key(5), bytes(SIZE))
    disk.write(key(6), bytes(SIZE))
    bench = new_bench(disk=disk)
    (start,) = bench.mover.answers.take_answer().starts
    assert (start.warm_capacity, start.cold_capacity) == (6, 6)
    assert set(start.on_disk) == {key(5), key(6)}
    assert not bench.mover.answers.take_answer()


def test_short_hashes_are_told_as_they_are(new_bench: NewBench, tmp_path: Path) -> None:
    bench, short = new_bench(disk=new_disk(tmp_path)), b"sixteen bytes.\x00\x00"
    bench.do(Spill(1, (3,), (1,)))
    bench.do(Demote(2, (1,), (short,)))
    bench.close()
    again = new_bench(disk=new_disk(tmp_path), hash_bytes=16)
    assert again.mover.answers.take_answer().starts == (WorkerStart(6, 6, (short,)),)
    (done,) = again.do(load(3, (2,), (8,), from_disk={0: short}))
    assert not done.failed


def test_a_damaged_record_costs_itself_only(
    new_bench: NewBench, disk: DiskTier, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench = new_bench(disk=disk)
    before = bench.bytes_of(4)
    bench.do(Spill(1, (3, 4), (1, 2)))
    bench.do(Demote(2, (1, 2), (key(33), key(44))))
    record = (tmp_path / "tier").read_bytes().index(bench.bytes_of(3))
    with (tmp_path / "tier").open("r+b") as file:
        file.seek(record + 100)
        file.write(b"\xff\x00\xff\x00")
    (done,) = bench.do(
        load(3, (3, 4), (8, 9), from_disk={0: key(33), 1: key(44)}, request="r"), release=(1, 2)
    )
    assert done.failed == {0}
    assert bench.mover.answers.take_loaded() == ({"r"}, {8})
    assert bench.bytes_of(9) == before
    assert disk.damaged == 1
    assert "the disk refused or damaged 1 record" in caplog.text


def test_a_disk_that_refuses_fails_what_it_refused(
    new_bench: NewBench, disk: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, write = new_bench(disk=disk), disk.write
    monkeypatch.setattr(disk, "write", lambda k, record: k != key(33) and write(k, record))
    bench.do(Spill(1, (3, 4), (1, 2)))
    (done,) = bench.do(Demote(2, (1, 2), (key(33), key(44))))
    assert done.failed == {0}
    assert (key(33) in disk, key(44) in disk) == (False, True)


def test_a_store_that_refuses_costs_this_engine_nothing_and_the_log_says_so(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.do(Spill(1, (3,), (1,)))
    (done,) = bench.do(Share(2, (1,), (key(33),)))
    assert done.failed == {0}
    assert "blocks were not given to the shared store (the store refused" in caplog.text
    assert "computed again" not in caplog.text


def test_a_worker_without_the_disk_that_others_have_says_so(new_bench: NewBench) -> None:
    bench = new_bench(disk=None)
    bench.do(Spill(1, (3,), (1,)))
    demoted, read = bench.do(
        Demote(2, (1,), (key(33),)), load(3, (2,), (8,), from_disk={0: key(33)})
    )
    assert demoted.failed == {0}
    assert read.failed == {0}


def test_a_stuck_disk_holds_up_nobody_but_its_own(new_bench: NewBench, tmp_path: Path) -> None:
    disk = SlowDisk(tmp_path / "slow", 6)
    bench = new_bench(disk=disk)
    before = bench.bytes_of(3)
    bench.do(Spill(1, (3, 4), (1, 2)))
    bench.give(
        Demote(2, (1,), (key(33),)), load(3, (3,), (8,), from_disk={0: key(33)}, request="cold")
    )
    done = bench.do(Spill(4, (5,), (4,)), load(5, (1,), (9,), request="warm"))
    assert {d.id for d in done} == {4, 5}
    assert bench.bytes_of(9) == before
    assert bench.mover.answers.take_loaded() == ({"warm"}, set())
    disk.leave.set()
    assert {d.id for d in bench.wait(2)} == {2, 3}
    assert bench.mover.answers.take_loaded() == ({"cold"}, set())
    assert bench.bytes_of(8) == before


def test_after_a_reset_the_disk_belongs_to_no_checkpoint(
    new_bench: NewBench, tmp_path: Path
) -> None:
    """Weights that change in memory leave their files as they are: a restart must find nothing."""
    bench = new_bench(disk=new_disk(tmp_path))
    costs = TransferCosts(time.monotonic)
    ledger = TierLedger(SIZE, 1, lambda event: None, time.monotonic, costs)
    directory = ledger.directory

    def demote(value: float) -> None:
        bench.cache.memory.fill_(value)
        copy = directory.begin(key(33))
        bench.do(Spill(ledger.book.number(), (3,), (copy.id,)))
        directory.complete_all([copy])
        ledger.make_room(directory.warm_capacity, [key(33)])
        _, erased, cleared, _ = directory.voided.take()
        work = TierWork(ledger.book.take(), erase=erased, disown=cleared)
        bench.mover.submit(work)
        for done in bench.wait(1):
            ledger.book.answer(done)

    ledger.started(bench.mover.answers.take_answer().starts)
    demote(1.0)
    assert directory.is_cold(key(33))
    ledger.clear()
    demote(2.0)
    assert directory.is_cold(key(33)), "the engine itself goes on with its disk"
    bench.close()
    again = new_bench(disk=new_disk(tmp_path))
    (start,) = again.mover.answers.take_answer().starts
    assert start.on_disk == ()
    (done,) = again.do(load(1, (9,), (8,), from_disk={0: key(33)}))
    assert done.failed == {0}


def hanging(new_bench: NewBench, tmp_path: Path) -> tuple[Bench, SlowDisk]:
    disk = SlowDisk(tmp_path / "slow", 6)
    watch = AnswerWatch(time.monotonic, patience_s=0.05)
    return new_bench(records=6, disk=disk, watch=watch), disk


def test_a_read_that_hangs_is_answered_as_failed_and_touches_nothing_later(
    new_bench: NewBench, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench, disk = hanging(new_bench, tmp_path)
    DiskTier.write(disk, key(33), bytes(SIZE))
    bench.give(load(1, (1,), (8,), from_disk={0: key(33)}, request="cold"))
    (done,) = bench.wait(gives_up=True)
    assert done.failed == {0}
    assert bench.mover.answers.take_loaded() == ({"cold"}, {8})
    assert "the disk does not answer" in caplog.text
    before = bench.bytes_of(8)
    # Its memory is released, and wanted by others: it stays the reader's.
    (spilled,) = bench.do(Spill(2, (0, 1, 2, 3, 4), (2, 3, 4, 5, 6)), release=(1,))
    assert not spilled.failed
    (refused,) = bench.do(load(3, (7,), (9,), from_disk={0: key(33)}))
    assert refused.failed == {0}, "at once: the disk did not move since"
    kept = [bench.bytes_of(block) for block in range(5)]
    disk.leave.set()
    bench.do(Spill(4, (5,), (8,)))
    bench.rest()
    assert bench.bytes_of(8) == before
    for block in range(5):
        bench.overwrite(block)
    bench.do(load(7, (2, 3, 4, 5, 6), (0, 1, 2, 3, 4)))
    assert [bench.bytes_of(block) for block in range(5)] == kept
    (again,) = bench.do(load(6, (9,), (9,), from_disk={0: key(33)}), release=(2,))
    assert not again.failed, "a disk that answers again is used again"
    assert bench.bytes_of(9) == bytes(SIZE)
    bench.arena.check_integrity()


def test_what_a_hanging_disk_does_not_bring_costs_nothing_that_memory_holds(
    new_bench: NewBench, tmp_path: Path
) -> None:
    bench, disk = hanging(new_bench, tmp_path)
    DiskTier.write(disk, key(33), bytes(SIZE))
    before = bench.bytes_of(3)
    bench.do(Spill(1, (3,), (1,)))
    bench.give(load(2, (1, 2), (8, 9), from_disk={1: key(33)}, request="both"))
    (late,) = bench.wait(gives_up=True)
    assert late.failed == {1}
    assert bench.bytes_of(8) == before
    assert bench.mover.answers.take_loaded() == ({"both"}, {9})
    bench.overwrite(8)
    (at_once,) = bench.do(load(3, (3, 1), (9, 8), from_disk={0: key(33)}))
    assert at_once.failed == {0}, "while it hangs nothing else is asked of it"
    assert bench.bytes_of(8) == before
    disk.leave.set()


def test_a_disk_that_breaks_costs_nothing_that_memory_holds(
    new_bench: NewBench, disk: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = new_bench(disk=disk)
    before = bench.bytes_of(3)
    bench.do(Spill(1, (3,), (1,)))
    monkeypatch.setattr(disk, "read", lambda *_: 1 / 0)
    (done,) = bench.do(load(2, (1, 2), (8, 9), from_disk={1: key(33)}))
    assert done.failed == {1}
    assert bench.bytes_of(8) == before


def test_a_write_that_hangs_is_answered_and_its_copy_stays_whole_until_it_is_over(
    new_bench: NewBench, tmp_path: Path
) -> None:
    bench, disk = hanging(new_bench, tmp_path)
    before = bench.bytes_of(3)
    bench.do(Spill(1, (3,), (1,)))
    bench.give(Demote(2, (1,), (key(33),)))
    (done,) = bench.wait(gives_up=True)
    assert done.failed == {0}
    bench.do(Spill(3, (4,), (2,)), release=(1,))
    bench.do(Spill(4, (5,), (3,)))
    disk.leave.set()
    bench.rest()
    assert record_of(disk, key(33)) == before
    assert bench.arena.used == 2


def test_a_disk_that_moves_slowly_is_waited_for() -> None:
    now = [0.0]
    watch = AnswerWatch(lambda: now[0], patience_s=5.0)
    watch.add(Demote(1, (1, 2, 3), (b"a", b"b", b"c")))
    for _ in range(10):
        now[0] += 4.0
        assert watch.overdue() == []
        watch.moved()
    now[0] += 6.0
    assert [job.id for job in watch.overdue()] == [1]
    assert watch.stuck
    assert watch.overdue() == []


def test_of_an_engine_that_ends_while_its_disk_hangs_nothing_is_taken_away(
    new_bench: NewBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the disk's thread writes afterwards is still what the checksum is of, in that file."""
    monkeypatch.setattr(threads, "_CLOSE_S", 0.05)
    bench, disk = hanging(new_bench, tmp_path)
    before = bench.bytes_of(3)
    bench.do(Spill(1, (3,), (1,)))
    bench.give(Demote(2, (1,), (key(33),)))
    while not bench.mover.lanes.disk.copies:
        time.sleep(0.001)
    bench.close()
    disk.leave.set()
    while bench.mover.lanes.disk.alive:
        time.sleep(0.001)
    assert record_of(disk, key(33)) == before
