"""The GPU bench as far as a CPU can run it: its matrix, its peers' bytes, its figures."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from typing import Any

import pytest
import torch
from kvgraph.kernels import ops
from kvgraph.kernels.layout import Blocks, PagedKv, SlotMap, new_memory
from kvgraph_bench.kernels.kernels_matrix import DELTA, SHAPES, Cell, places, summary
from kvgraph_bench.kernels.kernels_workbench import (
    Action,
    batched_copy,
    copy_then_rotate,
    index_copy,
    three_passes,
)

by_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: str(shape.name))


class HostEngine:
    """Copies runs as the driver would, at once."""

    def copy(self, sources: Any, targets: Any, size: int, stream: int) -> None:
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            ctypes.memmove(target, source, size)


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

    def copies(target: PagedKv) -> Action:
        return batched_copy(engine, arena, at.records, target, at.blocks)

    warmed = left_by(lambda to: ops.load(Blocks(arena, at.records), Blocks(to, at.blocks)))
    spliced = left_by(lambda to: ops.splice(arena, to, SlotMap(at.old, at.new, at.delta), rope))
    assert not torch.equal(warmed, spliced)
    assert torch.equal(warmed, left_by(lambda to: copies(to)()))
    assert torch.equal(warmed, left_by(lambda to: index_copy(arena, at.records, to, at.blocks)()))
    assert torch.equal(
        spliced, left_by(lambda to: copy_then_rotate(copies(to), to, at.new, at.delta, rope)())
    )
    assert torch.equal(spliced, left_by(
        lambda to: three_passes(engine, arena, at.records, to, at.blocks, DELTA, rope)()
    ))  # fmt: skip


def row(dtype: str, size: int, aligned: bool = True, **gb_per_s: float) -> dict[str, Any]:
    times = {
        name: {"us": size / rate / 1e3, "gb_per_s": rate, "bf16_gb_per_s": rate}
        for name, rate in gb_per_s.items()
    }
    return {"dtype": dtype, "aligned": aligned, "bf16_bytes": size, "times": times}


def test_figures_come_from_the_cells_that_the_targets_speak_of() -> None:
    large, small = 8 << 20, 1 << 20
    rows = [
        row("bf16", large, warm=48.0, splice=40.0, spill=1.0, batched_copy=36.0, index_copy=2.0),
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
        "from kvgraph_bench.kernels import kernels_gpu\n"
        "kernels_gpu.main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.strip() == ("this needs a GPU; `kvgraph bench kernels` measures CPUs too")
