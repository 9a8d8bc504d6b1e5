"""The operations on a GPU, queued on torch's current stream; no call waits for the device.

Slots, block numbers and Δ are expected in host memory, where reading them costs nothing. Only the
first use of a kernel waits, to compile it, and that of a pair of memories, to measure which method
is faster; ``prepare`` does both ahead. Kernels read host memory with ``cp.async`` and not with
Hopper's bulk copies and barriers, which were never tried on hardware.
"""

from __future__ import annotations

import torch

from ..gpu.calls import RESIDENT_GRID, attention_mass_call, confidence_call
from ..gpu.copy_engine import check_page_locked
from ..gpu.launch import bound, run
from ..gpu.moves import copy_by, copy_table, device_of, splice_by, splice_table
from ..layout import Blocks, PagedKv, SlotMap
from ..rope import Rope
from ..runs import block_runs
from ..tensors import Tensor
from .base import Confidence


def prepare(cache: PagedKv, arena: PagedKv) -> None:
    """Compile and measure whatever the first copies in both directions would otherwise wait for."""
    index = device_of(cache, arena).index
    if cache.layout.dtype == arena.layout.dtype:
        copy_table(index, True)
        copy_table(index, False)
    else:
        splice_table(index, arena.layout.dtype, cache.layout.dtype, False)
        splice_table(index, cache.layout.dtype, arena.layout.dtype, True)


def copy_blocks(source: Blocks, target: Blocks) -> None:
    """Copy as ``reference.copy_blocks`` does, by the copy engine or a kernel, whichever was
    measured to be faster. Raises LayoutError or TransferError.
    """
    runs = block_runs(source, target)
    if not len(runs.sources):
        return
    device = device_of(source.kv, target.kv)
    _check_reachable(source, device)
    _check_reachable(target, device)
    way, from_gpu = RESIDENT_GRID, source.kv.memory.is_cuda
    if not (from_gpu and target.kv.memory.is_cuda):
        way = copy_table(device.index, from_gpu).best(runs.size, len(runs.sources))
    copy_by(way, source.kv, target.kv, runs)


def splice(source: PagedKv, target: PagedKv, slots: SlotMap, rope: Rope) -> None:
    """Move like ``reference.splice``, by one kernel of as many thread blocks as were measured to be
    fastest. Raises LayoutError.
    """
    if not len(slots.delta):
        return
    device = device_of(source, target)
    _check_reachable(Blocks(source, slots.source // source.layout.tokens), device)
    _check_reachable(Blocks(target, slots.target // target.layout.tokens), device)
    splice_by(_splice_way(source, target, len(slots.delta)), source, target, slots, rope)


def attention_mass(
    cache: PagedKv, layer: int, queries: Tensor, block_table: Tensor, lengths: Tensor, scale: float
) -> Tensor:
    """Return the share of one layer's attention for each block; see ``base.Observer``."""
    device = str(device_of(cache))
    call, mass = attention_mass_call(cache, layer, queries, block_table, lengths, scale, device)
    run(call)
    return mass.mean(1)


def confidence(logits: Tensor) -> Confidence:
    call, out = confidence_call(logits.contiguous())
    run(call)
    return Confidence(*torch.unbind(out, -1))


def _splice_way(source: PagedKv, target: PagedKv, tokens: int) -> int:
    to_host = not target.memory.is_cuda
    if source.memory.is_cuda and not to_host:
        return RESIDENT_GRID
    far = target.layout if to_host else source.layout
    size = tokens * far.block_bytes // far.tokens
    index = device_of(source, target).index
    return splice_table(index, source.layout.dtype, target.layout.dtype, to_host).best(1, size)


def _check_reachable(blocks: Blocks, device: torch.device) -> None:
    """Refuse host memory that is not page-locked; block numbers on a GPU are trusted."""
    kv, numbers = blocks
    if kv.memory.is_cuda or numbers.is_cuda:
        return
    used = numbers[numbers >= 0]
    if used.numel():
        start = int(used[0]) * kv.layout.block_stride * kv.layout.itemsize
        with bound(device):
            check_page_locked(kv.memory.data_ptr() + start, kv.layout.name)
