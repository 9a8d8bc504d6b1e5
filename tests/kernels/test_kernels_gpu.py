"""The operations on a real GPU: the self-test's checks on two streams, and what they leave out.

Skipped where there is no GPU; needs torch, numpy and cuda-core, and no engine (where the sidecar's
packages are missing too, run it with ``--noconftest``).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from kvgraph.kernels import ops
from kvgraph.kernels.arena import Arena
from kvgraph.kernels.backends import reference
from kvgraph.kernels.gpu.moves import COPY_ENGINE, copy_by
from kvgraph.kernels.layout import Blocks, gpu_layout, new_memory
from kvgraph.kernels.runs import block_runs
from kvgraph_bench.selftest.kernel_checks import BLOCKS, TOKENS, Gpu, Pair, checks, gpu_checks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CHECKS = {**dict(checks(1)), **dict(gpu_checks())}
CHUNKED = ("splices", "int8 splices", "int8 spills")
LAYOUT = gpu_layout("LBNHC", 4, BLOCKS, 8, TOKENS, 128)


@pytest.fixture(params=["default stream", "own stream"])
def gpu(request: Any) -> Iterator[Gpu]:
    """Batched copies refuse the default stream, so both must be tried."""
    if request.param == "default stream":
        yield Gpu()
        return
    with torch.cuda.stream(torch.cuda.Stream()):
        yield Gpu()
    torch.cuda.synchronize()


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_of_the_self_test_holds(gpu: Gpu, name: str) -> None:
    CHECKS[name](gpu)


@pytest.mark.parametrize("name", [name for name in CHECKS if name.partition(" by ")[0] in CHUNKED])
def test_it_holds_in_many_small_chunks(gpu: Gpu, name: str, monkeypatch: Any) -> None:
    from kvgraph.kernels.gpu import moves

    chunk = 3 * (LAYOUT.int8_record(1) if "int8 spills" in name else LAYOUT).block_bytes
    monkeypatch.setattr(moves, "chunks", partial(moves.chunks, most=chunk, least=chunk // 3))
    CHECKS[name](gpu)


def test_the_arena_is_page_locked_slab_by_slab_and_stays_so(gpu: Gpu) -> None:
    arena = Arena(LAYOUT.record(64), slab_bytes=4 * LAYOUT.block_bytes)
    handles = arena.allocate(64)
    assert arena.committed_bytes == 64 * arena.record_bytes
    pair, records = Pair(gpu, LAYOUT), torch.arange(BLOCKS) * 5 % 64
    want = new_memory(LAYOUT.record(64))
    ops.spill(Blocks(pair.cache, torch.arange(BLOCKS)), Blocks(arena.kv, records))
    gpu.finish()
    reference.copy_blocks(Blocks(pair.plain, torch.arange(BLOCKS)), Blocks(want, records))
    for record in records.tolist():
        part = slice(record * LAYOUT.record(1).block_stride, None)
        size = LAYOUT.record(1).block_stride
        assert torch.equal(arena.kv.memory[part][:size], want.memory[part][:size])
    arena.free(handles)
    assert arena.committed_bytes == 64 * arena.record_bytes
    again = torch.from_numpy(arena.slots(arena.allocate(1)))
    ops.spill(Blocks(pair.cache, torch.tensor([3])), Blocks(arena.kv, again))
    gpu.finish()
    arena.close()


def test_batches_of_copies_are_taken_by_this_driver(gpu: Gpu) -> None:
    """Not a matter of correctness: without them each run costs a call."""
    from kvgraph.kernels.gpu.copy_engine import copy_engine

    pair, every = Pair(gpu, LAYOUT), torch.arange(BLOCKS)
    runs = block_runs(Blocks(pair.cache, every), Blocks(pair.arena, every.flip(0)))
    copy_by(COPY_ENGINE, pair.cache, pair.arena, runs)
    gpu.finish()
    if copy_engine().problem == "the driver has no cuMemcpyBatchAsync":
        pytest.skip("driver older than CUDA 12.8")
    assert copy_engine().problem is None
