"""What callers see: checked arguments, a back end that works, a choice that was measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kvgraph.kernels import ops
from kvgraph.kernels.backends import native, reference
from kvgraph.kernels.errors import BuildError, KernelError, SlotError
from kvgraph.kernels.gpu.method import COPY_CELLS, COPY_ENGINE, COPY_METHODS, Method, measured
from kvgraph.kernels.layout import Blocks, SlotMap, new_memory
from kvgraph.kernels.layout_engines import cpu_layout
from kvgraph.kernels.rope import Rope

LAYOUT = cpu_layout("vec", 2, 3, 2, 32, 32)
ROPE = Rope(10_000.0 ** (-torch.arange(0, 32, 2, dtype=torch.float64) / 32))


def test_numbers_out_of_range_move_nothing() -> None:
    cache, arena = new_memory(LAYOUT), new_memory(LAYOUT.record(2))
    cache.memory.fill_(1)
    one = torch.tensor([1])
    for blocks, records, complaint in (
        (torch.tensor([3]), one, "block 3 .* 0 to 2"),
        (torch.tensor([-1]), one, "block -1"),
        (one, torch.tensor([2]), "record 2 .* 0 to 1"),
        (torch.tensor([0, 1]), one, r"lengths \[1, 2\]"),
    ):
        with pytest.raises(SlotError, match=complaint):
            ops.spill(Blocks(cache, blocks), Blocks(arena, records))
        with pytest.raises(SlotError, match=complaint):
            ops.load(Blocks(arena, records), Blocks(cache, blocks))
    with pytest.raises(SlotError, match="slot 96"):
        ops.splice(arena, cache, SlotMap(one, torch.tensor([96]), one), ROPE)
    with pytest.raises(SlotError, match="slot 96"):
        ops.rotate_in_place(cache, torch.tensor([96]), one, ROPE)
    assert not arena.memory.any()


@pytest.fixture
def undecided() -> Iterator[None]:
    """No back end chosen yet, and none left chosen."""
    for decided in (ops.fastest, ops.native_problem):
        decided.cache_clear()
    yield
    for decided in (ops.fastest, ops.native_problem):
        decided.cache_clear()


def test_without_a_compiler_torch_does_it(undecided: None, monkeypatch: Any) -> None:
    def refuse(*_: Any) -> None:
        raise BuildError("no C++ compiler found")

    monkeypatch.setattr(native, "library", refuse)
    cache, arena = new_memory(LAYOUT), new_memory(LAYOUT.record(2))
    assert ops.backend(cache) is reference
    assert ops.native_problem() == "no C++ compiler found"
    cache.memory.fill_(1)
    ops.prepare(cache, arena)
    ops.spill(Blocks(cache, torch.tensor([2])), Blocks(arena, torch.tensor([1])))
    assert int(arena.memory.count_nonzero()) == LAYOUT.block_bytes // 2


def test_the_switch_is_explained_and_then_obeyed_for_good(
    undecided: None, monkeypatch: Any
) -> None:
    cache = new_memory(LAYOUT)
    monkeypatch.setenv(ops.SWITCH, "fast")
    for _ in range(2):
        with pytest.raises(KernelError, match=r"fast.*auto, reference"):
            ops.backend(cache)
    monkeypatch.setenv(ops.SWITCH, "reference")
    assert ops.backend(cache) is reference
    monkeypatch.setenv(ops.SWITCH, "auto")
    assert ops.backend(cache) is reference, "chosen once"


def test_the_method_is_what_was_measured_nearest() -> None:
    def seconds(method: Method, size: int, count: int) -> float:
        assert size * count <= 64 << 20
        if method == COPY_ENGINE:
            return count * (1e-5 + size / 50e9)
        return count * (1e-6 + size / min(method.grid * 0.4e9, 20e9))

    table = measured(seconds, COPY_METHODS, COPY_CELLS)
    assert table.best(2048, 4096).name == "kernel"
    assert table.best(2 << 20, 1) == COPY_ENGINE
    assert table.best(3000, 5000).name == "kernel"
    assert table.best(8 << 20, 100_000) == COPY_ENGINE
    assert table.best(2048, 4096).grid == 64, "no more thread blocks than help"


def test_importing_kernels_needs_no_cuda_and_compiles_nothing(tmp_path: Any) -> None:
    import os
    import subprocess
    import sys

    script = (
        "import sys; sys.modules['cuda'] = None; sys.modules['vllm'] = None\n"
        "from kvgraph.kernels import arena, compilers, disk, layout, layout_engines, ops\n"
        "from kvgraph.kernels import quant, rope, runs, tensors\n"
        "from kvgraph.kernels.backends import attention, device, mixed, native\n"
        "from kvgraph.kernels.gpu import calls, copy_engine, launch, measure, moves, streams\n"
    )
    env = {**os.environ, "AITHER_KVCACHE_KERNEL_CACHE": str(tmp_path)}
    subprocess.run([sys.executable, "-P", "-c", script], env=env, check=True)
    assert not list(tmp_path.iterdir())
