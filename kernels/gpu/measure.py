"""Measures which method is best on this machine, once per process, device and kind of move: a
fraction of a second, which waits for the device. ``device.prepare`` does so ahead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final

import torch

from ..layout import Blocks, PagedKv, SlotMap, gpu_layout
from ..rope import Rope
from ..runs import block_runs
from ..tensors import Tensor
from .method import (
    COPY_CELLS,
    COPY_METHODS,
    SPLICE_CELLS,
    SPLICE_METHODS,
    Method,
    MethodTable,
    measured,
)
from .moves import copy_by, splice_by

_ROUNDS: Final = 3  # of one measurement; chosen
_ROPE: Final = Rope(10_000.0 ** (-torch.arange(0, 128, 2, dtype=torch.float64) / 128))


@functools.cache
def copy_table(index: int, to_host: bool, /) -> MethodTable:
    """Return the table for copies between page-locked host memory and GPU ``index``, in one
    direction.
    """
    most = max(size * count for size, count in COPY_CELLS)
    memories = _memories(index, most, most)
    if to_host:
        memories.reverse()

    def seconds(method: Method, size: int, count: int) -> float:
        layout = gpu_layout("BLHNC", 1, count, 1, 1, size // 4, 0, torch.float32)
        source, target = (
            PagedKv(memory[: count * size].view(torch.float32), layout) for memory in memories
        )
        order = _shuffled(count)
        runs = block_runs(Blocks(source, order), Blocks(target, order))
        return device_seconds(index, lambda: copy_by(method, source, target, runs))

    return measured(seconds, COPY_METHODS, COPY_CELLS)


@functools.cache
def splice_table(
    index: int, dtype: torch.dtype, target_dtype: torch.dtype, to_host: bool, /
) -> MethodTable:
    """Return the table for splices between page-locked host memory and a GPU, by bytes on the
    host.
    """
    layouts = [gpu_layout("BLHNC", 4, 1, 8, 16, 128, dtype=of) for of in (dtype, target_dtype)]
    each = layouts[to_host].block_bytes
    most = max(size for _, size in SPLICE_CELLS) // each
    sizes = [most * layout.block_bytes for layout in layouts]
    memories = _memories(index, *(reversed(sizes) if to_host else sizes))
    source, target = (
        PagedKv(memory.view(layout.dtype), layout.record(most))
        for memory, layout in zip(reversed(memories) if to_host else memories, layouts, strict=True)
    )

    def seconds(method: Method, _: int, size: int) -> float:
        blocks = _shuffled(most)[: max(1, size // each)]
        slots = (blocks[:, None] * 16 + torch.arange(16)).reshape(-1)
        moved = SlotMap(slots, slots, torch.full_like(slots, 777))
        return device_seconds(index, lambda: splice_by(method, source, target, moved, _ROPE))

    return measured(seconds, SPLICE_METHODS, SPLICE_CELLS)


def device_seconds(index: int, action: Callable[[], None]) -> float:
    """Return the seconds that an idle device takes for an action, including queueing: the best of
    ``_ROUNDS``.
    """
    times = []
    with torch.cuda.device(index):
        for _ in range(1 + _ROUNDS):  # the first warms up
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.current_stream().synchronize()
            start.record()
            action()
            end.record()
            end.synchronize()
            times.append(float(start.elapsed_time(end)) / 1e3)
    return min(times[1:])


def _shuffled(count: int) -> Tensor:
    """A permutation, by a generator that leaves the engine's random state alone."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(count))


def _memories(index: int, host_bytes: int, device_bytes: int) -> list[Tensor]:
    """Zeroed memory on the host and on the GPU, so that no scale and no rotation is NaN."""
    return [
        torch.zeros(host_bytes, dtype=torch.uint8, pin_memory=True),
        torch.zeros(device_bytes, dtype=torch.uint8, device=torch.device("cuda", index)),
    ]
