"""What the GPU path computes on the host: chunks of a staged splice, packed uploads, copy batches.

The copies and kernels themselves run here in emulation, or through a driver of three lines.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvgraph.kernels.backends import native, reference
from kvgraph.kernels.errors import SlotError, TransferError
from kvgraph.kernels.gpu import copy_engine
from kvgraph.kernels.gpu.calls import COUNT_LIMIT, move_call, runs_call, uploaded
from kvgraph.kernels.gpu.copy_engine import CopyEngine, batched
from kvgraph.kernels.gpu.moves import chunks, fills_records, graded, worth_staging
from kvgraph.kernels.layout import Blocks, PagedKv, SlotMap, gpu_layout, new_memory
from kvgraph.kernels.rope import Rope
from kvgraph.kernels.runs import ByteRuns, block_runs
from kvgraph_bench.selftest import emulation

ROPE = Rope(10_000.0 ** (-torch.arange(0, 32, 2, dtype=torch.float64) / 32))


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
        native.load(Blocks(source, records), Blocks(buffer, torch.arange(len(records))))
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
    reference.spill(Blocks(source, blocks), Blocks(plain, records))
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
