"""Moves beside compute: on a CPU they are over at once; on a GPU they run behind their fence."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from kvgraph.kernels.gpu.streams import TransferStream

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_on_a_cpu_a_move_is_over_when_run_returns() -> None:
    transfer, moved = TransferStream(torch.device("cpu")), []
    for number in range(3):
        ticket = transfer.run(transfer.fence(), lambda number=number: moved.append(number))
        assert ticket.done()
        ticket.wait()
    assert moved == [0, 1, 2]


def test_a_move_that_fails_says_so() -> None:
    transfer = TransferStream(torch.device("cpu"))

    def fail() -> None:
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        transfer.run(transfer.fence(), fail)
    assert transfer.run(transfer.fence(), lambda: None).done()


def test_a_cpu_engine_never_touches_cuda() -> None:
    script = (
        "import torch\n"
        "from kvgraph.kernels.gpu.streams import TransferStream\n"
        "t = TransferStream(torch.device('cpu')); t.run(t.fence(), lambda: None).wait()\n"
        "assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-P", "-c", script], check=True)


@needs_gpu
def test_a_move_waits_for_the_fence_and_for_nothing_later() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    transfer = TransferStream(device)
    source = torch.zeros(1 << 20, device=device)
    target = torch.zeros(1 << 20, pin_memory=True)
    torch.cuda._sleep(50_000_000)
    source.fill_(7)
    fence = transfer.fence()
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
        transfer.run(transfer.fence(), half)
    assert bool((target == 1).all())
