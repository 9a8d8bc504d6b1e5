"""A lane of a worker's transfers: what a device is given, and when, and what of it is told."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
from cuda_streams import Cuda
from kvgraph.hooks.tiers import lanes
from kvgraph.hooks.tiers.lanes import TransferLane
from kvgraph.kernels.gpu.streams import Fence, TransferStream, mark

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
            Fence(None),
            partial(move, number),
            lambda seconds, error, number=number: told.append((number, seconds)),
        )
    every.set()
    deadline = time.monotonic() + PATIENCE_S
    while len(queued) < 5:
        assert time.monotonic() < deadline, "a move is kept from the device"
        time.sleep(0.001)
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
