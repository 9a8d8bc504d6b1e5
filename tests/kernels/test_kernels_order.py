"""Staged splices under a hostile scheduler: streams are queues that run in any order that events
allow, so that an event that nobody waits for shows as wrong bytes, without a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvgraph.kernels.backends import native, reference
from kvgraph.kernels.errors import SlotError, TransferError
from kvgraph.kernels.gpu import copy_engine, moves
from kvgraph.kernels.gpu.calls import COUNT_LIMIT, move_call, runs_call, uploaded
from kvgraph.kernels.gpu.copy_engine import CopyEngine, batched
from kvgraph.kernels.gpu.method import Method
from kvgraph.kernels.gpu.moves import chunks, fills_records, graded, worth_staging
from kvgraph.kernels.layout import Blocks, PagedKv, SlotMap, gpu_layout, new_memory
from kvgraph.kernels.rope import Rope
from kvgraph.kernels.runs import ByteRuns, block_runs
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


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32 - 1), per_chunk=st.integers(1, 5), count=st.integers(1, 9 * 8),
    int8=st.booleans(), falling=st.booleans(),
)  # fmt: skip
def test_a_staged_splice_is_the_direct_one(
    seed: int, per_chunk: int, count: int, int8: bool, falling: bool
) -> None:
    random = torch.Generator().manual_seed(seed)
    cache = gpu_layout("LBNHC", 2, 9, 2, 8, 32)
    source = new_memory(cache.int8_record(9) if int8 else cache.record(9))
    want, got = new_memory(cache), new_memory(cache)
    if int8:
        plain = new_memory(cache)
        plain.memory.normal_(generator=random)
        slots = torch.arange(cache.slots)
        reference.splice(plain, source, SlotMap(slots, slots, torch.zeros_like(slots)), ROPE)
    else:
        source.memory.normal_(generator=random)
    old = torch.randint(0, 9 * 8, (count,), generator=random)
    new = torch.randperm(9 * 8, generator=random)[:count]
    delta = torch.randint(-3, 3, (count,), generator=random)
    reference.splice(source, want, SlotMap(old, new, delta), ROPE)

    size = source.layout.block_bytes
    parts = chunks(source, old, falling, per_chunk * size, size)
    assert parts.largest <= per_chunk
    layout = source.layout.record(parts.largest)
    buffers = [new_memory(layout), new_memory(layout)]
    call = move_call(
        buffers[0], got, SlotMap(parts.slots, new[parts.order], delta[parts.order]), ROPE, grid=2
    )
    start = 0
    for number, end in enumerate(parts.ends):
        buffer = buffers[number % 2]
        records = parts.records[parts.of(number)]
        assert parts.places[parts.of(number)].tolist() == list(range(len(records)))
        native.copy_blocks(Blocks(source, records), Blocks(buffer, torch.arange(len(records))))
        emulation.run(call.part(start, end - start, source=buffer.memory))
        start = end
    assert start == count
    assert torch.equal(want.memory.view(torch.int16), got.memory.view(torch.int16))


def test_chunks_are_small_where_nothing_overlaps_them() -> None:
    assert graded(64, 8, 1) == [8] * 7 + [4, 2, 1, 1]
    assert graded(64, 8, 2) == [8] * 7 + [4, 2, 2]
    assert graded(3, 8, 2) == [2, 1]
    assert graded(1, 8, 2) == [1]
    assert graded(0, 8, 2) == []
    kv = new_memory(gpu_layout("BLHNC", 1, 64, 1, 16, 32))
    size, slots = kv.layout.block_bytes, torch.arange(kv.layout.slots)
    to_gpu, from_gpu = (chunks(kv, slots, falling, 8 * size, size) for falling in (True, False))
    assert torch.diff(torch.tensor(to_gpu.starts)).tolist() == [8] * 7 + [4, 2, 1, 1]
    assert torch.diff(torch.tensor(from_gpu.starts)).tolist() == [1, 1, 2, 4] + [8] * 7
    for parts in (to_gpu, from_gpu):
        assert parts.records.tolist() == list(range(64))
        assert parts.ends[-1] == len(slots)
        assert parts.largest == 8


def test_whole_records_alone_are_replaced() -> None:
    target = new_memory(gpu_layout("BLHNC", 1, 8, 1, 16, 32))
    whole, torn, none = torch.randperm(48), torch.arange(47), torch.empty(0, dtype=torch.int64)
    filled = [fills_records(target, chunks(target, each, False)) for each in (whole, torn, none)]
    assert filled == [True, False, False]


def test_only_what_is_mostly_wanted_is_staged() -> None:
    source = new_memory(gpu_layout("BLHNC", 1, 8, 1, 16, 32))
    cases = {
        "most": torch.arange(5, 5 + 64),
        "half": torch.arange(0, 128, 2),
        "skipped": torch.tensor([-1, -1]),
        "none": torch.empty(0, dtype=torch.int64),
    }
    kept = {name: SlotMap(each, each, each).kept().source for name, each in cases.items()}
    parts = {name: chunks(source, each, True) for name, each in kept.items()}
    worth = [name for name, each in parts.items() if worth_staging(source, each)]
    assert worth == ["most"]


def test_packed_tensors_arrive_as_they_were() -> None:
    tensors = (
        torch.arange(5), torch.rand(3, 7), torch.empty(0, dtype=torch.int64),
        torch.rand(4, 4).t(), torch.tensor([1], dtype=torch.int8), torch.arange(3),
    )  # fmt: skip
    for tensor, part in zip(tensors, uploaded(tensors, "cpu"), strict=True):
        assert part.dtype == tensor.dtype
        assert torch.equal(part, tensor)
        assert part.is_contiguous()
        assert part.data_ptr() % 16 == 0 or not part.numel()


def host_driver(refused: int = 0) -> tuple[CopyEngine, list[str]]:
    """The driver's two functions over host memory, with the C signatures of CUDA 13."""
    calls: list[str] = []

    def single(target: int, source: int, size: int, stream: int) -> int:
        calls.append("single")
        ctypes.memmove(target, source, size)
        return 0

    def batch(
        targets: int, sources: int, sizes: int, count: int, attributes: int, firsts: int,
        kinds: int, stream: int,
    ) -> int:  # fmt: skip
        calls.append("batch")
        assert (kinds, stream) == (1, 7)
        assert ctypes.c_size_t.from_address(firsts).value == 0
        order, *hints, flags = (ctypes.c_int * 6).from_address(attributes)
        assert (order, hints, flags) == (1, [0] * 4, 1)
        if refused:
            return refused
        columns = [(ctypes.c_size_t * count).from_address(at) for at in (targets, sources, sizes)]
        for row in zip(*columns, strict=True):
            ctypes.memmove(*row)
        return 0

    made = CopyEngine(copy_engine.SINGLE(single), batched(copy_engine.BATCH(batch), ()))
    return made, calls


@pytest.mark.parametrize("refused", [0, 801])
def test_runs_go_in_one_batch_or_one_by_one(refused: int) -> None:
    cache = gpu_layout("LBHNC", 3, 6, 2, 8, 32)
    source, plain = new_memory(cache), new_memory(cache.record(6))
    target = new_memory(cache.record(6))
    source.memory.normal_()
    blocks, records = torch.randperm(6)[:4], torch.randperm(6)[:4]
    runs = block_runs(Blocks(source, blocks), Blocks(target, records))
    engine, calls = host_driver(refused)
    starts = (source.memory.data_ptr() + runs.sources, target.memory.data_ptr() + runs.targets)
    engine.copy(*starts, runs.size, 7)
    reference.copy_blocks(Blocks(source, blocks), Blocks(plain, records))
    assert torch.equal(plain.memory, target.memory)
    if refused:
        assert calls == ["batch"] + ["single"] * len(runs.sources)
        assert engine.problem is not None
        assert "801" in engine.problem
    else:
        assert calls == ["batch"]
        assert engine.problem is None


def test_the_attributes_are_those_of_the_bindings() -> None:
    driver = pytest.importorskip("cuda.bindings.driver")
    made = driver.CUmemcpyAttributes()
    made.srcAccessOrder = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    made.flags = driver.CUmemcpyFlags.CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
    raw = (ctypes.c_int * 6).from_address(int(made.getPtr()))
    assert list(raw) == copy_engine.ATTRIBUTES.tolist()


def test_a_refused_copy_is_an_error() -> None:
    engine = CopyEngine(copy_engine.SINGLE(lambda *_: 700), None)
    with pytest.raises(TransferError, match="700"):
        engine.copy(np.array([1]), np.array([2]), 3, 4)
    engine.copy(np.empty(0, np.int64), np.empty(0, np.int64), 3, 4)


def test_counts_that_outgrow_32_bits_are_refused() -> None:
    kv = new_memory(gpu_layout("BLHNC", 1, 1, 1, 1, 32))
    starts = np.zeros(3, np.int64)
    with pytest.raises(SlotError, match="pieces"):
        runs_call(kv, kv, ByteRuns(starts, starts, COUNT_LIMIT * 2048))


def test_a_part_of_a_call_leaves_the_call_alone() -> None:
    kv: Any = new_memory(gpu_layout("BLHNC", 1, 2, 1, 4, 32))
    call = move_call(kv, kv, SlotMap(torch.arange(8), torch.arange(8), torch.ones(8).long()), ROPE)
    before = [arg.value for arg in call.args]
    other = PagedKv(kv.memory.clone(), kv.layout)
    part = call.part(3, 2, source=other.memory)
    assert [arg.value for arg in call.args] == before
    assert part.args.source.value == other.memory.data_ptr()
    assert call.part(3, 2, target=other.memory).args.target.value == other.memory.data_ptr()
    assert part.args.tokens.value == 2
    after = {"source", "tokens"}
    for column in ("source_slots", "target_slots", "rows"):
        assert getattr(part.args, column).value == getattr(call.args, column).value + 3 * 8
        after.add(column)
    same = set(part.args._fields) - after
    assert all(getattr(part.args, name) is getattr(call.args, name) for name in same)
