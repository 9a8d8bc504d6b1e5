"""The operations on a GPU: queued on torch's current stream; nothing waits for the device.

Slots, block numbers and Δ are expected in host memory, where looking at them costs nothing. Only
the first use of a kernel waits, to compile it, and that of a pair of memories, to measure which
method is faster; ``prepare`` does both beforehand. Kernels read host memory with ``cp.async`` and
not with Hopper's bulk copies and barriers: those were never tried on hardware.
"""

from __future__ import annotations

import torch

from ..gpu.calls import DEFAULT_GRID, RESIDENT_GRID, attention_mass_call, confidence_call, move_call
from ..gpu.copy_engine import check_page_locked
from ..gpu.launch import bound, run
from ..gpu.measure import copy_table, splice_table
from ..gpu.method import Method
from ..gpu.moves import copy_by, device_of, splice_by
from ..layout.block_runs import block_runs
from ..layout.layout import PagedKv
from ..maths.rope import Rope
from ..tensors import Tensor
from .base import Confidence


def prepare(cache: PagedKv, arena: PagedKv) -> None:
    """Compile and measure what the first copies there and back would else wait for."""
    index = device_of(cache, arena).index
    if cache.layout.dtype == arena.layout.dtype:
        copy_table(index, True)
        copy_table(index, False)
    else:
        splice_table(index, arena.layout.dtype, cache.layout.dtype)


def spill(cache: PagedKv, blocks: Tensor, arena: PagedKv, records: Tensor) -> None:
    """``reference.spill``, by the copy engine or by a kernel, whichever was measured faster.

    Raises:
        LayoutError: The arena is not page-locked.
        TransferError: The driver refuses.
    """
    _copy_blocks(cache, blocks, arena, records)


def warm(arena: PagedKv, records: Tensor, cache: PagedKv, blocks: Tensor) -> None:
    """``reference.warm``; raises like ``spill``."""
    _copy_blocks(arena, records, cache, blocks)


def splice(
    source: PagedKv, source_slots: Tensor, target: PagedKv, target_slots: Tensor, delta: Tensor,
    rope: Rope,
) -> None:  # fmt: skip
    """``reference.splice``: one kernel, or records staged by the copy engine; as was measured.

    Raises:
        LayoutError: The layouts hold different models, or the arena is not page-locked.
    """
    if not len(delta):
        return
    _check_reachable(source, source_slots // source.layout.tokens, device_of(source, target))
    _check_reachable(target, target_slots // target.layout.tokens, device_of(source, target))
    method = _splice_method(source, target, len(delta))
    splice_by(method, source, source_slots, target, target_slots, delta, rope)


def rotate_in_place(cache: PagedKv, slots: Tensor, delta: Tensor, rope: Rope) -> None:
    """``reference.rotate_in_place``."""
    run(move_call(
        cache, slots, cache, slots, delta, rope, keys_only=True, grid=RESIDENT_GRID,
        device=str(device_of(cache)),
    ))  # fmt: skip


def attention_mass(
    cache: PagedKv, layer: int, queries: Tensor, block_table: Tensor, lengths: Tensor, scale: float
) -> Tensor:
    """``attention.attention_mass``."""
    device = str(device_of(cache))
    call, mass = attention_mass_call(cache, layer, queries, block_table, lengths, scale, device)
    run(call)
    return mass.mean(1)


def confidence(logits: Tensor) -> Confidence:
    """``attention.confidence``."""
    call, out = confidence_call(logits.contiguous())
    run(call)
    return Confidence(*torch.unbind(out, -1))


def _copy_blocks(source: PagedKv, blocks: Tensor, target: PagedKv, others: Tensor) -> None:
    runs = block_runs(source.layout, blocks, target.layout, others)
    if not len(runs.sources):
        return
    device = device_of(source, target)
    _check_reachable(source, blocks, device)
    _check_reachable(target, others, device)
    method = Method("kernel", RESIDENT_GRID)
    if not (source.memory.is_cuda and target.memory.is_cuda):
        table = copy_table(device.index, source.memory.is_cuda)
        method = table.best(runs.size, len(runs.sources))
    copy_by(method, source, target, runs)


def _splice_method(source: PagedKv, target: PagedKv, tokens: int) -> Method:
    if source.memory.is_cuda:
        return Method("direct", RESIDENT_GRID if target.memory.is_cuda else DEFAULT_GRID)
    size = tokens * source.layout.block_bytes // source.layout.tokens
    index = target.memory.device.index
    return splice_table(index, source.layout.dtype, target.layout.dtype).best(1, size)


def _check_reachable(kv: PagedKv, blocks: Tensor, device: torch.device) -> None:
    """Host memory must be page-locked; numbers on a GPU are trusted, as everywhere."""
    if kv.memory.is_cuda or blocks.is_cuda:
        return
    used = blocks[blocks >= 0]
    if used.numel():
        start = int(used[0]) * kv.layout.block_stride * kv.layout.itemsize
        with bound(device):
            check_page_locked(kv.memory.data_ptr() + start, kv.layout.name)
