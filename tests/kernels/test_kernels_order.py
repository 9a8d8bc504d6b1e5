"""What a GPU's copies and launches are given, without a GPU."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from kvgraph.kernels.backends import reference
from kvgraph.kernels.errors import SlotError, TransferError
from kvgraph.kernels.gpu import copy_engine
from kvgraph.kernels.gpu.calls import COUNT_LIMIT, runs_call, uploaded
from kvgraph.kernels.gpu.copy_engine import CopyEngine, batched
from kvgraph.kernels.layout import Blocks, gpu_layout, new_memory
from kvgraph.kernels.runs import ByteRuns, block_runs


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
