"""Moves beside compute: on a CPU they are over at once; on a GPU they run behind their fence."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from cuda_streams import Cuda
from kvgraph.kernels.gpu.streams import TransferStream, mark

CPU = torch.device("cpu")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_on_a_cpu_a_move_is_over_when_run_returns() -> None:
    transfer, moved = TransferStream(CPU), []
    for number in range(3):
        ticket = transfer.run(mark(CPU), lambda number=number: moved.append(number))
        assert ticket.done()
        ticket.wait()
    assert moved == [0, 1, 2]


def test_a_move_that_fails_says_so() -> None:
    transfer = TransferStream(CPU)

    def fail() -> None:
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        transfer.run(mark(CPU), fail)
    assert transfer.run(mark(CPU), lambda: None).done()


def test_a_cpu_engine_never_touches_cuda() -> None:
    script = (
        "import torch\n"
        "from kvgraph.kernels.gpu.streams import TransferStream, mark\n"
        "cpu = torch.device('cpu')\n"
        "TransferStream(cpu, first=True).run(mark(cpu), lambda: None).wait()\n"
        "assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-P", "-c", script], check=True)


GPU = torch.device("cuda", 1)


def test_whoever_waits_for_a_move_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the usual events a waiting thread asks again and again, with a core of its own."""
    cuda = Cuda(monkeypatch)
    ticket = TransferStream(GPU).run(mark(GPU), lambda: None)
    ticket.wait()
    assert cuda.said() == ["record", "wait", "record", "record", "sleep"]


def test_a_moves_time_begins_behind_its_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch)
    fence = mark(GPU)
    ticket = TransferStream(GPU).run(fence, lambda: cuda.log.append(("move", None)))
    assert cuda.said() == ["record", "wait", "record", "move", "record"]
    assert cuda.log[0] == ("record", "engine")
    assert cuda.log[1] == ("wait", fence.event)
    assert ticket.seconds() == 1.5


def test_what_was_queued_before_an_error_is_awaited_asleep(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch)

    def half() -> None:
        raise OSError("the rest does not come")

    with pytest.raises(OSError, match="the rest"):
        TransferStream(GPU).run(mark(GPU), half)
    assert cuda.said()[-2:] == ["record", "sleep"]
    assert "spin" not in cuda.said()


def test_a_stream_may_go_before_others(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda *options: made.append(options))
    TransferStream(GPU)
    TransferStream(GPU, first=True)
    assert made == [(GPU, 0), (GPU, -1)], "a lower number goes first, and 0 is the ordinary one"


@needs_gpu
def test_a_move_waits_for_the_fence_and_for_nothing_later() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    transfer = TransferStream(device)
    source = torch.zeros(1 << 20, device=device)
    target = torch.zeros(1 << 20, pin_memory=True)
    torch.cuda._sleep(50_000_000)
    source.fill_(7)
    fence = mark(device)
    ticket = transfer.run(fence, lambda: target.copy_(source, non_blocking=True) and None)
    assert not ticket.done(), "queued behind tens of milliseconds of work, and did not wait for it"
    ticket.wait()
    assert ticket.done()
    assert bool((target == 7).all())

    torch.cuda._sleep(2_000_000_000)  # the engine computes on, for about a second
    source[:1].clone()
    later = transfer.run(fence, lambda: None)
    later.wait()
    assert not torch.cuda.current_stream().query(), "the move did not wait for the engine"
    torch.cuda.synchronize()


@needs_gpu
def test_what_failed_half_way_is_over_before_the_error_arrives() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    transfer = TransferStream(device)
    target = torch.zeros(1 << 24, pin_memory=True)
    source = torch.ones(1 << 24, device=device)

    def half() -> None:
        target.copy_(source, non_blocking=True)
        raise RuntimeError("the other half does not come")

    with pytest.raises(RuntimeError, match="other half"):
        transfer.run(mark(device), half)
    assert bool((target == 1).all())
