"""What a GPU's copies and launches are given, without a GPU."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from kvgraph.kernels.errors import SlotError, TransferError
from kvgraph.kernels.gpu import copy_engine
from kvgraph.kernels.gpu.calls import COUNT_LIMIT, runs_call, uploaded
from kvgraph.kernels.gpu.copy_engine import CopyEngine
from kvgraph.kernels.layout import gpu_layout, new_memory
from kvgraph.kernels.runs import ByteRuns


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
