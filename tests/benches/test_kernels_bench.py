"""The GPU bench as far as a CPU can run it: its matrix, its peers' bytes, its figures."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from typing import Any

import pytest
import torch
from kvgraph.bench.kernels import kernels_timer, kernels_workbench
from kvgraph.bench.kernels.kernels_matrix import (
    DELTA,
    LLAMA,
    PAGE_BYTES,
    SHAPES,
    Cell,
    cells,
    places,
    predicted_seconds,
    slots_of,
)
from kvgraph.bench.kernels.kernels_peers import (
    BatchedCopy,
    CopyThenRotate,
    IndexCopy,
    ThreePasses,
    VllmSwap,
    vllm_swap,
)
from kvgraph.bench.kernels.kernels_prefill import PrefillStack, StackShape
from kvgraph.bench.kernels.kernels_summary import summary
from kvgraph.kernels import ops
from kvgraph.kernels.layout import Blocks, PagedKv, SlotMap, new_memory

by_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: str(shape.name))


class HostEngine:
    """Copies runs as the driver would, at once."""

    def copy(self, sources: Any, targets: Any, size: int, stream: int) -> None:
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            ctypes.memmove(target, source, size)


def swap(sources: Any, targets: Any, sizes: Any, is_src_access_order_any: bool) -> None:
    """``swap_blocks_batch`` of vLLM's operations, on the host."""
    for source, target, size in zip(sources.tolist(), targets.tolist(), sizes, strict=True):
        ctypes.memmove(target, source, int(size))


def test_the_matrix_is_whole_and_its_pages_have_their_size() -> None:
    made = list(cells())
    assert len(set(made)) == len(made)
    described = [cell.describe() for cell in made]
    for name, values in {
        "shape": {"llama-8b", "qwen2.5-7b", "mla"}, "dtype": {"bf16", "int8"},
        "aligned": {True, False}, "pages": {16, 64, 256, 1024, 8192},
    }.items():  # fmt: skip
        assert {row[name] for row in described} == values
    for cell, row in zip(made, described, strict=True):
        assert 0.85 < row["page_bytes"] / cell.page < 1.15
        assert row["bytes"] == row["pages"] * cell.record().block_bytes
    assert {cell.page for cell in made} == set(PAGE_BYTES)
    whole = Cell(LLAMA, 2 << 20, 64, int8=False, aligned=True)
    assert whole.geometry() == (32, 8, 16)
    assert whole.wire_bytes == 64 << 20 << 1
    int8 = Cell(LLAMA, 2 << 20, 64, int8=True, aligned=True)
    assert int8.wire_bytes / whole.wire_bytes == pytest.approx(264 / 512)


@by_shape
def test_unaligned_tokens_land_between_blocks_and_none_is_lost(shape: Any) -> None:
    for aligned in (True, False):
        cell = Cell(shape, 32 << 10, 16, int8=False, aligned=aligned)
        tokens, at = cell.geometry()[2], places(cell)
        assert at.new.max() < cell.cache(cell.pages + 1).slots
        assert len(at.old.unique()) == len(at.new.unique()) == cell.pages * tokens
        whole = torch.equal(at.new, slots_of(at.blocks, tokens))
        assert whole == aligned


def test_the_prediction_is_bytes_over_bandwidth_and_a_launch() -> None:
    assert predicted_seconds(50_000_000, 50e9, 4e-6) == pytest.approx(1.004e-3)


@by_shape
def test_every_peer_leaves_the_same_bytes(shape: Any) -> None:
    cell = Cell(shape, 32 << 10, 16, int8=False, aligned=True)
    at, rope, engine = places(cell), shape.rope(), HostEngine()
    arena = new_memory(cell.record())
    arena.memory.normal_(generator=torch.Generator().manual_seed(1))
    start = new_memory(cell.cache(cell.pages + 1))
    start.memory.fill_(7)

    def left_by(action: Any) -> Any:
        target = PagedKv(start.memory.clone(), start.layout)
        action(target)
        return target.memory.view(torch.int16)

    def copies(target: PagedKv) -> BatchedCopy:
        return BatchedCopy(engine, arena, at.records, target, at.blocks)

    warmed = left_by(lambda to: ops.load(Blocks(arena, at.records), Blocks(to, at.blocks)))
    spliced = left_by(lambda to: ops.splice(arena, to, SlotMap(at.old, at.new, at.delta), rope))
    assert not torch.equal(warmed, spliced)
    assert torch.equal(warmed, left_by(lambda to: copies(to)()))
    assert torch.equal(
        warmed, left_by(lambda to: IndexCopy(arena, at.records, to, at.blocks)())
    )  # fmt: skip
    assert torch.equal(
        warmed, left_by(lambda to: VllmSwap(swap, arena, at.records, to, at.blocks)())
    )
    assert torch.equal(
        spliced, left_by(lambda to: CopyThenRotate(copies(to), to, at.new, at.delta, rope)())
    )
    assert torch.equal(spliced, left_by(
        lambda to: ThreePasses(engine, arena, at.records, to, at.blocks, DELTA, rope)()
    ))  # fmt: skip


def test_a_small_container_on_a_large_machine_is_not_filled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is page-locked counts at once: the kernel would end the bench."""
    monkeypatch.setattr(kernels_workbench, "available_bytes", lambda: 3 << 30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70 << 30, 80 << 30))
    assert kernels_workbench.affordable(torch.device("cuda", 0)) == 3 << 29
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 << 30, 10 << 30))
    assert kernels_workbench.affordable(torch.device("cuda", 0)) == 1 << 30


def test_a_rival_gathers_once_copies_once_and_scatters_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A page at a time it would be a rival of straw."""
    cell = Cell(LLAMA, 32 << 10, 16, int8=False, aligned=True)
    at, source, target = places(cell), new_memory(cell.record()), new_memory(cell.cache(17))
    rival = IndexCopy(source, at.records, target, at.blocks)
    counted: list[str] = []

    class Counting(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            counted.append(func.__name__)
            return func(*args, **(kwargs or {}))

    with Counting():
        rival()
    assert counted == ["index_select", "copy_", "index_copy_"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it may be")
def test_a_gather_on_the_host_is_part_of_a_rivals_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device must not spin meanwhile: what was gathered by then would have cost nothing."""
    queued: list[float | None] = []

    def once(action: Any, queueing: float | None = None) -> tuple[float, float]:
        queued.append(queueing)
        return 1.0, 1.0

    monkeypatch.setattr(kernels_timer, "once", once)
    monkeypatch.setattr(kernels_timer, "cost_of", lambda action: (1.0, 0.001))
    cell = Cell(LLAMA, 32 << 10, 16, int8=False, aligned=True)
    at, source, target = places(cell), new_memory(cell.record()), new_memory(cell.cache(17))
    rival = IndexCopy(source, at.records, target, at.blocks)
    kernels_timer.time_in_turns({"ours": lambda: None, "index_copy": rival}, (1, 1))
    assert queued == [0.001, None]


def test_without_a_vllm_for_gpus_its_swap_is_no_rival(vllm_loaded: None) -> None:
    assert vllm_swap(2 << 20) is None


def test_vllms_own_choice_of_a_swap_still_has_its_name(vllm_loaded: None) -> None:
    """So that a vLLM that renames it does not leave the bench without this rival."""
    from types import SimpleNamespace

    from vllm.v1.kv_offload.cpu.gpu_worker import _select_swap_blocks_fn

    chosen = _select_swap_blocks_fn([[SimpleNamespace(page_size_bytes=2 << 20)]], gpu_to_cpu=False)
    assert chosen.__name__ == "swap_blocks_batch"


def test_the_prefill_stack_is_causal_and_depends_on_position() -> None:
    torch.manual_seed(1)
    stack = PrefillStack(StackShape(2, 64, 4, 2, 96), 9, "cpu")
    states = torch.randn(9, 64, dtype=torch.bfloat16)
    out = stack(states)
    assert out.shape == states.shape
    assert bool(out.isfinite().all())
    changed = states.clone()
    changed[-1] += 1
    assert torch.equal(stack(changed)[:-1], out[:-1])
    assert not torch.equal(stack(changed)[-1], out[-1])
    swapped = states.clone()
    swapped[[0, 1]] = swapped[[1, 0]]
    assert not torch.equal(stack(swapped)[-1], out[-1])


def row(dtype: str, size: int, aligned: bool = True, **gb_per_s: float) -> dict[str, Any]:
    times = {
        name: {"us": size / rate / 1e3, "gb_per_s": rate, "bf16_gb_per_s": rate}
        for name, rate in gb_per_s.items()
    }
    return {"dtype": dtype, "aligned": aligned, "bf16_bytes": size, "times": times}


def test_figures_come_from_the_cells_that_the_targets_speak_of() -> None:
    large, small = 8 << 20, 1 << 20
    rows = [
        row("bf16", large, warm=48.0, splice=40.0, spill=1.0, vllm_swap=36.0, index_copy=2.0),
        row("bf16", 2 * large, warm=45.0, splice=45.0),
        row("bf16", small, warm=1.0, splice=0.5),
        row("bf16", large, aligned=False, splice=3.0),
        row("int8", large, spill=2.0, splice=95.0),
        {"dtype": "bf16", "aligned": True, "bf16_bytes": large, "skipped": "time"},
        {"dtype": "bf16", "aligned": True, "bf16_bytes": large, "failed": "it did",
         "equals_reference": False},
    ]  # fmt: skip
    rows[3]["times"]["warm"] = {"skipped": "memory"}
    limit = 1.15 * 50e6 / 50e9 + 10e-6
    made = summary(
        rows, {"splice": [2.0, 2.0], "prefill": [30.0, 50.0]}, (50_000_000, [limit / 2]), 50e9
    )
    figures = {figure.name: figure for figure in made}
    assert figures["warm_of_copy_engine"].samples == pytest.approx([0.96, 0.9])
    assert figures["warm_of_copy_engine_worst"].samples == pytest.approx([0.9])
    assert figures["splice_over_warm"].samples == pytest.approx([1.2, 1.0])
    assert figures["warm_over_best_rival"].samples == pytest.approx([0.75])
    assert "splice_over_best_rival" not in figures
    assert figures["splice_int8_of_copy_engine"].samples == pytest.approx([1.9])
    assert figures["splice_64_of_limit"].samples == pytest.approx([0.5])
    assert figures["splice_vs_prefill_1280"].samples == [15.0, 25.0]
    assert figures["splice_vs_prefill_1280"].as_dict()["value"] == 20.0
    assert figures["equals_reference"].samples == [0.0]
    nothing = {figure.name for figure in summary([], {}, (1, [1.0]), 50e9)}
    assert nothing == {"copy_engine_gb_per_s", "splice_64_of_limit"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="would measure for minutes")
def test_the_gpu_bench_needs_torch_numpy_and_cuda_core_alone() -> None:
    script = (
        "import sys\n"
        "for name in ('vllm', 'transformers', 'rich', 'typer', 'zmq', 'msgspec', 'usearch',\n"
        "             'networkx.algorithms', 'pydantic_settings', 'fastapi', 'uvicorn',\n"
        "             'orjson', 'prometheus_client', 'matplotlib', 'httpx', 'tokenizers'):\n"
        "    sys.modules[name] = None\n"
        "from kvgraph.bench.kernels import kernels_gpu\n"
        "kernels_gpu.main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.strip() == (
        "this needs a GPU; `kvgraph bench kernels` measures CPUs too"
    )  # fmt: skip
