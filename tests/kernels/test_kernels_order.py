"""Staged splices under a hostile scheduler: streams are queues that run in any order that events
allow, so that an event that nobody waits for shows as wrong bytes, without a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import random
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from kvgraph.kernels.backends import reference
from kvgraph.kernels.gpu import moves
from kvgraph.kernels.gpu.method import Method
from kvgraph.kernels.layout import PagedKv, SlotMap, gpu_layout, new_memory
from kvgraph.kernels.rope import Rope
from kvgraph_bench.selftest import emulation

CACHE = gpu_layout("LBNHC", 2, 13, 2, 8, 32)
ROPE = Rope(10_000.0 ** (-torch.arange(0, 32, 2, dtype=torch.float64) / 32))


class Event:
    """Passed or not yet."""

    def __init__(self) -> None:
        self.passed = False


class Stream:
    """A queue of events to wait for and of work; an event is recorded by work of its own."""

    def __init__(self) -> None:
        self.queue: deque[Event | Callable[[], Any]] = deque()
        self.cuda_stream = self

    def wait_event(self, event: Event) -> None:
        self.queue.append(event)

    def record_event(self) -> Event:
        event = Event()
        self.queue.append(lambda: setattr(event, "passed", True))
        return event

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def ready(self) -> bool:
        return bool(self.queue) and getattr(self.queue[0], "passed", True)

    def step(self) -> None:
        task = self.queue.popleft()
        if not isinstance(task, Event):
            task()


class Gpu:
    """Two streams over host memory; puts itself in the place of torch's."""

    index = 0

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.compute, self.side = Stream(), Stream()
        self.buffers: list[Any] = []
        self._current = [self.compute]
        self._empty = torch.empty
        patch.setattr(torch.cuda, "current_stream", lambda *_: self._current[-1])
        patch.setattr(torch.cuda, "stream", self._use)
        patch.setattr(torch, "empty", self._allocate)
        patch.setattr(moves, "side_stream", lambda _: self.side)
        patch.setattr(moves, "bound", lambda _: contextlib.nullcontext())
        patch.setattr(moves, "batch_stream", lambda: contextlib.nullcontext(self._current[-1]))
        patch.setattr(moves, "copy_engine", lambda: self)
        patch.setattr(moves, "device_of", lambda *_: self)
        patch.setattr(moves, "run", self._run)
        patch.setattr(moves, "launcher", lambda *_: self._run)
        patch.setattr(moves, "RESIDENT_GRID", 2)

    def __str__(self) -> str:
        return "cpu"

    def copy(self, sources: Any, targets: Any, size: int, stream: Stream) -> None:
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            stream.queue.append(lambda to=target, of=source: ctypes.memmove(to, of, size))

    def finish(self, dice: random.Random, bias: float) -> None:
        """Run all that is queued; ``bias`` is how much rather the compute stream is chosen."""
        while self.compute.queue or self.side.queue:
            ready = [stream for stream in (self.compute, self.side) if stream.ready()]
            assert ready, "each stream waits for the other"
            (ready[0] if len(ready) == 1 or dice.random() < bias else ready[1]).step()

    def _run(self, call: Any) -> None:
        self._current[-1].queue.append(lambda: emulation.run(call))

    def _allocate(self, *size: Any, device: Any = None, **options: Any) -> Any:
        made = self._empty(*size, **options)
        if device is self:
            self.buffers.append(made)
        return made

    @contextlib.contextmanager
    def _use(self, stream: Stream) -> Iterator[None]:
        self._current.append(stream)
        yield
        self._current.pop()


@pytest.mark.parametrize("bias", [0.02, 0.5, 0.98], ids=["copies first", "even", "compute first"])
def test_no_order_of_the_streams_spoils_a_staged_splice(bias: float, monkeypatch: Any) -> None:
    real = moves.chunks
    two_blocks = 2 * CACHE.block_bytes
    for seed in range(20):
        torch.manual_seed(seed)
        source, written = new_memory(CACHE.record(13)), new_memory(CACHE.record(13))
        written.memory.normal_()
        want, got = new_memory(CACHE), new_memory(CACHE)
        old, new = torch.randperm(104)[:100], torch.randperm(104)[:100]
        delta = torch.randint(-3, 3, (100,))
        with monkeypatch.context() as patch:
            patch.setattr(moves, "chunks", partial(real, most=two_blocks, least=two_blocks))
            gpu = Gpu(patch)
            # What was queued before is still on its way; what comes after reuses the buffers.
            gpu.compute.queue.append(partial(source.memory.copy_, written.memory))
            moves.splice_by(Method("staged", 0), source, got, SlotMap(old, new, delta), ROPE)
            assert len(gpu.buffers) == 2
            gpu.compute.queue.extend(buffer.zero_ for buffer in gpu.buffers)
            gpu.finish(random.Random(seed), bias)
        reference.splice(written, want, SlotMap(old, new, delta), ROPE)
        assert torch.equal(want.memory.view(torch.int16), got.memory.view(torch.int16)), seed


class OnGpu:
    """Host memory that says it is a GPU's."""

    is_cuda = True

    def __init__(self, tensor: Any) -> None:
        self.data_ptr = tensor.data_ptr


@pytest.mark.parametrize("bias", [0.02, 0.5, 0.98], ids=["copies first", "even", "compute first"])
def test_no_order_of_the_streams_spoils_a_staged_spill(bias: float, monkeypatch: Any) -> None:
    """Quantised on the GPU, whole records at a time, then copied out."""
    real, record = moves.chunks, CACHE.int8_record(13)
    size = 3 * record.block_bytes
    for seed in range(20):
        torch.manual_seed(seed)
        cache, want, got = new_memory(CACHE), new_memory(record), new_memory(record)
        written = torch.randn(CACHE.elements).to(CACHE.dtype)
        blocks, records = torch.randperm(13)[:11], torch.randperm(13)[:11]
        old, new = ((each[:, None] * 8 + torch.arange(8)).reshape(-1) for each in (blocks, records))
        slots = SlotMap(old, new, torch.zeros_like(old))
        seen = new_memory(record)
        with monkeypatch.context() as patch:
            patch.setattr(moves, "chunks", partial(real, most=size, least=record.block_bytes))
            gpu = Gpu(patch)
            # The engine still writes what is spilled; what comes after reuses the buffers, and
            # reads the records.
            gpu.compute.queue.append(partial(cache.memory.copy_, written))
            source = PagedKv(OnGpu(cache.memory), CACHE)
            moves.splice_by(Method("staged", 0), source, got, slots, ROPE)
            assert len(gpu.buffers) == 2
            gpu.compute.queue.extend(buffer.zero_ for buffer in gpu.buffers)
            gpu.compute.queue.append(partial(seen.memory.copy_, got.memory))
            gpu.finish(random.Random(seed), bias)
        reference.splice(PagedKv(written, CACHE), want, slots, ROPE)
        assert torch.equal(want.memory, got.memory), seed
        assert torch.equal(want.memory, seen.memory), seed


def test_a_spill_of_parts_of_records_keeps_the_other_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not spilled stands in host memory alone: a whole record must not replace it."""
    record = CACHE.int8_record(13)
    cache, want, got = new_memory(CACHE), new_memory(record), new_memory(record)
    cache.memory.normal_()
    for kv in (want, got):
        kv.memory.fill_(7)
    slots = SlotMap(torch.arange(5), torch.arange(5) + 9, torch.zeros(5).long())
    gpu = Gpu(monkeypatch)
    monkeypatch.setattr(moves, "DEFAULT_GRID", 2)
    moves.splice_by(Method("staged", 0), PagedKv(OnGpu(cache.memory), CACHE), got, slots, ROPE)
    gpu.finish(random.Random(1), 0.5)
    reference.splice(cache, want, slots, ROPE)
    assert torch.equal(want.memory, got.memory)
