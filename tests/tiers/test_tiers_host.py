"""A worker's lanes, the memory that a machine has for copies, and what reaches disks meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
from cuda_streams import Cuda
from kvgraph.hooks.tiers import lanes
from kvgraph.hooks.tiers.host import available_bytes, share_of
from kvgraph.hooks.tiers.jobs import Demote, TierWork
from kvgraph.hooks.tiers.lanes import TransferLane
from kvgraph.hooks.vllm.tiers.idle import IDLE_S
from kvgraph.kernels.gpu.streams import Fence, TransferStream, mark
from pool_engine import Engine, Turn, parked, prompt
from waiting import until

pytestmark = pytest.mark.usefixtures("vllm_loaded")

GPU: Final = torch.device("cuda", 1)
PATIENCE_S: Final = 20.0


def test_a_device_has_the_next_move_before_the_last_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    every, leave = threading.Event(), threading.Event()
    queued, told = list[int](), list[tuple[int, float]]()

    def move(number: int) -> None:
        assert every.wait(PATIENCE_S)
        queued.append(number)

    class Device(TransferStream):
        """Takes moves at once, and is done with them when a test says so."""

        def run(self, fence: Fence, operation: Callable[[], None]) -> Any:
            operation()
            return SimpleNamespace(
                done=leave.is_set, wait=lambda: leave.wait(PATIENCE_S), seconds=lambda: 0.5
            )

    monkeypatch.setattr(lanes, "TransferStream", Device)
    lane = TransferLane("lane", torch.device("cpu"))
    for number in range(5):
        lane.put(
            Fence(None), partial(move, number),
            lambda seconds, _, number=number: told.append((number, seconds)),
        )  # fmt: skip
    every.set()
    until(lambda: len(queued) == 5, "a move is kept from the device")
    assert not told
    leave.set()
    assert lane.close(), "what was put is finished first"
    assert queued == [0, 1, 2, 3, 4]
    assert told == [(number, 0.5) for number in range(5)]


def test_a_lanes_thread_asks_nothing_of_another_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins with the first one, and would make itself a context there."""
    cuda, chosen = Cuda(monkeypatch), threading.local()

    def asked(event: Any) -> bool:
        assert getattr(chosen, "device", "cuda:0") == GPU
        return True

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(chosen, "device", device))
    monkeypatch.setattr(torch.cuda.Event, "query", asked, raising=False)
    lane, told = TransferLane("lane", GPU), list[Exception | None]()
    lane.put(mark(GPU), lambda: None, lambda seconds, error: told.append(error))
    assert lane.close()
    assert told == [None]
    assert cuda.said().count("sleep") == 1


def test_a_failed_move_is_told_and_the_next_is_done() -> None:
    cpu, told = torch.device("cpu"), list[tuple[str, bool]]()
    lane = TransferLane("lane", cpu)

    def fail() -> None:
        raise OSError("no room")

    for name, move in (("bad", fail), ("good", lambda: None)):
        lane.put(mark(cpu), move, lambda _, error, name=name: told.append((name, error is None)))
    assert lane.close()
    assert told == [("bad", False), ("good", True)]


def test_a_move_that_cannot_be_asked_is_told_as_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[Exception | None]()

    def lost(*_: Any) -> Any:
        raise RuntimeError("the device is lost")

    class Device(TransferStream):
        def run(self, fence: Fence, operation: Callable[[], None]) -> Any:
            return SimpleNamespace(done=lost, wait=lost, seconds=lost)

    monkeypatch.setattr(lanes, "TransferStream", Device)
    lane = TransferLane("lane", torch.device("cpu"))
    for _ in range(2):
        lane.put(Fence(None), lambda: None, lambda _, error: told.append(error))
    assert lane.close()
    assert [str(error) for error in told] == ["the device is lost"] * 2


def test_whoever_chokes_on_an_answer_ends_no_lane() -> None:
    cpu, told = torch.device("cpu"), list[float]()
    lane = TransferLane("lane", cpu)
    lane.put(mark(cpu), lambda: None, lambda *_: 1 / 0)
    lane.put(mark(cpu), lambda: None, lambda seconds, _: told.append(seconds))
    assert lane.close()
    assert len(told) == 1


GIB = 1 << 30


def machine(root: Path, available_gib: int, groups: str = "") -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(
        f"MemTotal: 999999999999 kB\nMemAvailable: {available_gib << 20} kB\n"
    )
    (root / "proc/self/cgroup").write_text(groups)
    return root


def put(root: Path, **numbers: dict[str, int | str]) -> None:
    """Files of control groups, by the group's path."""
    for group, values in numbers.items():
        folder = root / "sys/fs/cgroup" / group.replace("__", "/")
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in values.items():
            (folder / name).write_text(f"{value}\n")


def test_without_a_control_group_the_machine_decides(tmp_path: Path) -> None:
    assert available_bytes(machine(tmp_path, 64)) == 64 * GIB


def test_the_narrowest_group_decides_and_its_file_cache_counts_as_free(tmp_path: Path) -> None:
    root = machine(tmp_path, 512, "0::/pods/engine\n")
    put(
        root,
        pods={"memory.max": 100 * GIB, "memory.current": 70 * GIB,
              "memory.stat": f"anon 5\ninactive_file {10 * GIB}"},
        pods__engine={"memory.max": "max", "memory.current": 60 * GIB},
    )  # fmt: skip
    assert available_bytes(root) == 40 * GIB


def test_groups_of_the_older_kind_are_read_too(tmp_path: Path) -> None:
    root = machine(tmp_path, 512, "5:cpu:/x\n4:memory:/job/7\n0::/\n")
    put(
        root,
        memory={"memory.limit_in_bytes": 9223372036854771712},
        memory__job__7={"memory.limit_in_bytes": 32 * GIB, "memory.usage_in_bytes": 12 * GIB,
                        "memory.stat": f"total_inactive_file {2 * GIB}"},
    )  # fmt: skip
    assert available_bytes(root) == 22 * GIB


def test_a_group_that_is_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    root = machine(tmp_path, 512, "0::/\n")
    (root / "sys/fs/cgroup").mkdir(parents=True)
    (root / "sys/fs/cgroup/memory.max").write_text(str(GIB))
    (root / "sys/fs/cgroup/memory.current").write_text(str(2 * GIB))
    assert available_bytes(root) == 0


@pytest.mark.parametrize(("sharers", "given"), [(1, 64), (8, 14.4)])
def test_workers_share_what_there_is(tmp_path: Path, sharers: int, given: float) -> None:
    """Eight workers that are given 64 GiB each would be 512: on a machine of 128, each has less."""
    root = machine(tmp_path, 128)
    assert share_of(64 * GIB, sharers, root) == int(given * GIB)


def steps(engine: Engine, seconds: float = 5.0) -> None:
    """An engine that goes on stepping for a while."""
    end = engine.now + seconds
    while engine.now < end:
        engine.step()
        engine.worker.finish_all()
    engine.settle()


def on_disk(engine: Engine, turn: Turn) -> list[bool]:
    return [engine.directory.is_cold(each) for each in turn.request.block_hashes]


def test_blocks_in_the_pool_are_on_disk_an_hour_after_their_request() -> None:
    engine = Engine(blocks=33, warm=32, cold=32)
    turn = engine.serve(prompt(4, 1))
    engine.now += IDLE_S - 60
    steps(engine)
    assert not any(on_disk(engine, turn))
    engine.now += 120
    steps(engine)
    assert all(on_disk(engine, turn))
    assert engine.pool.get_cached_block(turn.request.block_hashes[0], [0]), "nothing evicted them"
    assert set(engine.worker.disk) == set(turn.request.block_hashes)


def test_blocks_in_memory_are_too_and_stay_there() -> None:
    engine = Engine(warm=64, cold=64)
    turn = parked(engine)
    assert not any(on_disk(engine, turn))
    engine.now += IDLE_S
    steps(engine)
    assert all(on_disk(engine, turn))
    assert all(engine.directory.warm(each) for each in turn.request.block_hashes)
    again = engine.serve([*prompt(4, 1), 7])
    assert (again.loaded, again.computed) == (4, 0)


def test_a_restart_finds_all_of_an_idle_chain_its_root_too() -> None:
    """The root is in use all the time, and its blocks would never reach a disk by themselves."""
    engine = Engine(blocks=33, warm=32, cold=64)
    shared = prompt(3, 1, extra=0)
    first = engine.serve([*shared, *prompt(3, 2)])
    for number in range(30):
        engine.now += IDLE_S / 20
        engine.serve([*shared, *prompt(1, 10 + number)])
    steps(engine)
    assert all(on_disk(engine, first))


def test_each_block_is_written_once() -> None:
    engine, written = Engine(blocks=33, warm=32, cold=64), list[bytes]()
    submit = engine.worker.submit

    def noted(work: TierWork) -> None:
        written.extend(each for job in work.jobs if isinstance(job, Demote) for each in job.hashes)
        submit(work)

    engine.worker.submit = noted  # type: ignore[method-assign]
    tokens = prompt(3, 1)
    for _ in range(3):
        turn = engine.serve(tokens)
        engine.now += IDLE_S
        steps(engine)
    assert sorted(written) == sorted(turn.request.block_hashes)
    engine.push_out()
    engine.push_out()
    assert len(set(written)) == len(written), "leaving memory, they need no second write"


@pytest.mark.parametrize("why", ["evicted", "reset", "adapter", "no disk"])
def test_what_may_not_or_cannot_be_on_disk_is_left_alone(why: str) -> None:
    engine = Engine(warm=8, cold=0 if why == "no disk" else 64, spill_all=False)
    engine.advise(spill_first=[])
    turn = engine.ask(prompt(4, 1))
    if why == "adapter":
        turn.request.lora_request = object()
    engine.finish_loading(turn)
    engine.end(turn)
    if why == "evicted":
        engine.push_out()
    elif why == "reset":
        engine.reset()
    engine.now += IDLE_S
    steps(engine)
    assert not any(on_disk(engine, turn))
    engine.check_whole()


def test_an_idle_engine_does_not_step_for_it() -> None:
    engine = Engine(blocks=33, warm=32, cold=32)
    engine.serve(prompt(4, 1))
    engine.now += IDLE_S
    engine.step()
    engine.worker.finish_all()
    engine.step()
    assert not engine.busy
