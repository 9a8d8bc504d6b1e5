"""``kvgraph bench kernels``: what moving KV costs on this CPU, beside memcpy and beside prefill.

Where there is a GPU, that is measured instead (``kernels_gpu``). On a CPU each operation moves 64
blocks of a cache in the CPU engine's own layout; a sample is the ratio to a memcpy of as many bytes
just before, so that a machine that grows slower meanwhile slows both.
"""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from kvgraph.kernels import ops
from kvgraph.kernels.backends import native, reference
from kvgraph.kernels.layout import Blocks, KvLayout, PagedKv, SlotMap, new_memory
from kvgraph.kernels.layout_engines import cpu_isa, cpu_layout
from kvgraph.kernels.rope import Rope, rope_from_config
from rich.console import Console

from ..errors import BenchError
from ..figures import Figures
from ..serving.child import result_of
from ..serving.model import ModelShape, ensure_model

ROUNDS: Final = 15
BLOCKS: Final = 64
TOKENS: Final = 32
HEAD_DIM: Final = 128
LAYERS: Final = 16
KV_HEADS: Final = 8
# About 100 M parameters, half the layers' work in the MLP, as in Llama.
LARGE: Final = ModelShape(
    hidden=768, layers=12, heads=12, kv_heads=4, intermediate=2048, vocab=16384, spread=0.02
)


@dataclass
class GpuFigures(Figures):
    """Figures with the machine and the cells that they were taken from."""

    # an object each; printed before the figures, one a line, when JSON is asked for
    entries: list[dict[str, Any]] = field(default_factory=list)

    def print(self, as_json: bool = False, console: Console | None = None) -> None:
        console = console or Console()
        for entry in self.entries if as_json else []:
            console.file.write(json.dumps(entry) + "\n")
        super().print(as_json, console)


def run(progress: bool = True, model: str | None = None) -> Figures:
    if torch.cuda.is_available():
        return _run_on_gpu(Console(stderr=True, quiet=not progress))
    problem = ops.native_problem()
    if problem:
        raise BenchError(f"the compiled CPU path is what this measures: {problem}")
    figures = Figures("kernels")
    console = Console(stderr=True, quiet=not progress)
    with console.status("moving 64 blocks, beside memcpy") as status:
        _bandwidth(figures)
        status.update("rotating in bf16, beside fp64")
        figures.add("splice_rel_error", _relative_error(), "‖error‖ / ‖K‖", "≤ 0.0031")
        status.update("re-prefilling 640 tokens in a real engine")
        seconds = result_of(
            f"{__package__}.kernels_engine", model or str(ensure_model(LARGE)),
            VLLM_CPU_KVCACHE_SPACE="1",
        )  # fmt: skip
        figures.add("prefill_640_ms", [s * 1e3 for s in seconds["prefill"]], "ms")
        figures.add("splice_640_ms", [s * 1e3 for s in seconds["splice"]], "ms")
        pairs = zip(seconds["prefill"], seconds["splice"], strict=True)
        ratios = [prefill / splice for prefill, splice in pairs]
        figures.add("splice_vs_prefill_640", ratios, "×", "≥ 20")
    return figures


def _run_on_gpu(console: Console) -> Figures:
    from .kernels_gpu import run as run_on_gpu

    figures = GpuFigures("kernels")
    with console.status("") as status:
        for made in run_on_gpu(status.update, figures.entries.append):
            figures.add(made.name, made.samples, made.unit, made.target)
    return figures


def _bandwidth(figures: Figures) -> None:
    isa = cpu_isa(torch.bfloat16, TOKENS, HEAD_DIM)
    layout = cpu_layout(isa, LAYERS, 2 * BLOCKS, KV_HEADS, TOKENS, HEAD_DIM)
    cache, arena = new_memory(layout), new_memory(layout.record(BLOCKS))
    cache.memory.normal_()
    size = BLOCKS * layout.block_bytes
    memcpy = _memcpy(size)
    actions = _actions(cache, arena)
    samples: dict[str, list[float]] = {name: [] for name in actions}
    for number in range(ROUNDS + 1):
        for name, action in actions.items():
            before, own = _seconds(memcpy), _seconds(action)
            if number:  # the first round warms up
                samples[name].append(before / own)
    targets = {"spill": "≥ 0.5", "load": "≥ 0.5", "splice": "≥ 0.15"}
    for name, ratios in samples.items():
        figures.add(f"{name}_bw_ratio", ratios, "of memcpy", targets[name])


def _actions(cache: PagedKv, arena: PagedKv) -> dict[str, Callable[[], None]]:
    """Blocks are scattered on both sides."""
    random = torch.Generator().manual_seed(1)
    blocks = torch.randperm(cache.layout.blocks, generator=random)[:BLOCKS]
    records = torch.randperm(BLOCKS, generator=random)
    rope, old, new = _rope(), _slots(records), _slots(blocks)
    delta = torch.full_like(old, 777)
    moved = SlotMap(old, new, delta)
    here, there = Blocks(cache, blocks), Blocks(arena, records)
    return {
        "spill": lambda: native.copy_blocks(here, there),
        "load": lambda: native.copy_blocks(there, here),
        "splice": lambda: native.splice(arena, cache, moved, rope),
    }


def _memcpy(size: int) -> Callable[[], object]:
    source = torch.ones(size, dtype=torch.uint8)
    target = torch.zeros(size, dtype=torch.uint8)
    return lambda: ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel())


def _relative_error() -> list[float]:
    """K kept in bf16, moved and rounded again, against the unrounded K rotated in fp64."""
    exact = torch.randn(128, 2, HEAD_DIM, dtype=torch.float64, generator=torch.manual_seed(1))
    position, slots = torch.arange(100_000, 100_128), torch.arange(128)
    layout = cpu_layout("vec", 1, 4, 2, TOKENS, HEAD_DIM)
    errors = []
    for rope in (_rope(), _rope(rope_type="yarn", factor=4.0)):
        for delta in (1, 777, -4000, 100_000):
            source, target = new_memory(layout), new_memory(layout)
            _write_keys(source, layout, slots, _rotated(rope, exact, position))
            moved = torch.full_like(slots, delta)
            ops.splice(source, target, SlotMap(slots, slots.flip(0), moved), rope)
            got = reference.read_plane(target, layout.key, 0, slots.flip(0)).double()
            want = _rotated(rope, exact, position + delta)
            errors.append(float((got - want).norm() / want.norm()))
    return errors


def _write_keys(kv: PagedKv, layout: KvLayout, slots: Any, keys: Any) -> None:
    reference.write_plane(kv, layout.key, 0, slots, keys.float())


def _rotated(rope: Rope, keys: Any, position: Any) -> Any:
    angle = position.double()[:, None] * rope.inv_freq[None, :]
    return rope.rotate(keys, angle.cos(), angle.sin())


def _rope(**settings: Any) -> Rope:
    config = {
        "model_type": "llama", "hidden_size": HEAD_DIM, "num_attention_heads": 1,
        "max_position_embeddings": 131072, "original_max_position_embeddings": 32768,
        "rope_parameters": {"rope_theta": 500000.0, **settings},
    }  # fmt: skip
    return rope_from_config(config)


def _slots(blocks: Any) -> Any:
    return (blocks[:, None] * TOKENS + torch.arange(TOKENS)).reshape(-1)


def _seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started
