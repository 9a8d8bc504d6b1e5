"""The operations on a GPU: launches on torch's current stream, nothing waits for the device."""

from __future__ import annotations

import functools
from typing import Any

import torch

from .attention import Confidence
from .build import compile_kernel
from .calls import KernelCall, attention_mass_call, confidence_call, copy_call, move_call
from .errors import BuildError
from .layout import KvLayout, PagedKv
from .plans import copy_plan
from .rope import Rope
from .transfer import METHODS, MethodTable, measured


def run(call: KernelCall) -> None:
    """Launch on torch's current stream; returns at once."""
    from cuda.core import LaunchConfig, launch

    config = LaunchConfig(grid=call.grid, block=call.threads, shmem_size=call.shared)
    kernel = _kernel(call.kernel, call.defines, torch.cuda.current_device())
    launch(torch.cuda.current_stream(), config, kernel, *call.args)


@functools.cache
def _kernel(kernel: str, defines: tuple[str, ...], device: int) -> Any:
    try:
        from cuda.core import Device, ObjectCode
    except ImportError as error:
        raise BuildError("CUDA kernels need cuda.core: pip install 'kvgraph[cuda]'") from error
    Device(device).set_current()
    major, minor = torch.cuda.get_device_capability(device)
    made = compile_kernel(kernel, defines, f"sm_{major}{minor}")
    return ObjectCode.from_cubin(made.code).get_kernel(kernel)


def spill(cache: PagedKv, blocks: Any, arena: PagedKv, records: Any) -> None:
    """``reference.spill``, by the copy engine or by a kernel, whichever was measured faster."""
    _copy_blocks(cache, blocks, arena, records)


def warm(arena: PagedKv, records: Any, cache: PagedKv, blocks: Any) -> None:
    """``reference.warm``."""
    _copy_blocks(arena, records, cache, blocks)


def splice(
    source: PagedKv, source_slots: Any, target: PagedKv, target_slots: Any, delta: Any, rope: Rope
) -> None:
    """``reference.splice``, in one fused kernel."""
    device = _device(source, target)
    run(move_call(source, source_slots, target, target_slots, delta, rope, device=device))


def rotate_in_place(cache: PagedKv, slots: Any, delta: Any, rope: Rope) -> None:
    """``reference.rotate_in_place``."""
    device = _device(cache, cache)
    run(move_call(cache, slots, cache, slots, delta, rope, keys_only=True, device=device))


def attention_mass(
    cache: PagedKv, layer: int, queries: Any, block_table: Any, lengths: Any, scale: float
) -> Any:
    """``attention.attention_mass``."""
    device = _device(cache, cache)
    call, mass = attention_mass_call(cache, layer, queries, block_table, lengths, scale, device)
    run(call)
    return mass.mean(1)


def confidence(logits: Any) -> Confidence:
    """``attention.confidence``."""
    call, out = confidence_call(logits.contiguous())
    run(call)
    return Confidence(*torch.unbind(out, -1))


def _copy_blocks(source: PagedKv, blocks: Any, target: PagedKv, others: Any) -> None:
    device = _device(source, target)
    plan = copy_plan(source.layout, target.layout)
    runs = len(blocks)
    for extent, _, _ in plan.axes:
        runs *= extent
    table = _table(torch.cuda.current_device())
    if table.best(plan.run * source.layout.itemsize, runs) == "kernel":
        run(copy_call(source, blocks, target, others, device=device))
        return
    for block, other in zip(blocks.tolist(), others.tolist(), strict=True):
        _block_view(target, plan.run, plan.axes, other, 2).copy_(
            _block_view(source, plan.run, plan.axes, block, 1), non_blocking=True
        )


def _block_view(
    kv: PagedKv, run: int, axes: list[tuple[int, int, int]], block: int, which: int
) -> Any:
    layout: KvLayout = kv.layout
    shape = (*(axis[0] for axis in axes), run)
    strides = (*(axis[which] for axis in axes), 1)
    return kv.memory.as_strided(shape, strides, block * layout.block_stride)


@functools.cache
def _table(device: int) -> MethodTable:
    """Measured once a process and device, on first use; about a second."""
    host = torch.empty(64 << 20, dtype=torch.uint8).pin_memory()
    memory = torch.empty_like(host, device=f"cuda:{device}")
    return measured(functools.partial(_time, host, memory))


def _time(host: Any, memory: Any, method: str, size: int, count: int) -> float:
    """Seconds on the device for ``count`` runs of ``size`` bytes from host memory."""
    from .layout import gpu_layout

    assert method in METHODS
    layout = gpu_layout("BLHNC", 1, count, 1, 1, size // 4, 0, torch.float32)
    source, target = (
        PagedKv(tensor[: count * size].view(torch.float32), layout) for tensor in (host, memory)
    )
    order = torch.randperm(count)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(2):  # the first warms up
        start.record()
        if method == "kernel":
            run(copy_call(source, order, target, order, device=str(memory.device)))
        else:
            for block in order.tolist():
                _block_view(target, size // 4, [], block, 1).copy_(
                    _block_view(source, size // 4, [], block, 1), non_blocking=True
                )
        end.record()
        end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _device(*memories: PagedKv) -> str:
    return next(str(kv.memory.device) for kv in memories if kv.memory.is_cuda)
