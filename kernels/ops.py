"""The operations for callers. Each checks its arguments and uses the fastest back end: CUDA kernels
for GPU memory, compiled C++ for host memory; torch if that cannot be compiled, or always with
``AITHER_KVCACHE_KERNELS=reference`` (default ``auto``), read once per process.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Final

import torch

from .backends import attention, device, mixed, native, reference
from .backends.base import Backend, Observer
from .backends.mixed import AttentionResult, KvPart
from .errors import BuildError, KernelError, SlotError
from .gpu.calls import uploaded
from .layout import Blocks, PagedKv, SlotMap
from .rope import Rope
from .tensors import Tensor

SWITCH: Final = "AITHER_KVCACHE_KERNELS"
CHOICES: Final = ("auto", "reference")


def prepare(cache: PagedKv, arena: PagedKv) -> None:
    """Compile and measure before the first copies: seconds on a GPU. Raises BuildError."""
    backend(cache, arena).prepare(cache, arena)


def spill(blocks: Blocks, records: Blocks) -> None:
    """Copy blocks of a cache to records of the arena; see ``reference.copy_blocks``.
    Raises SlotError or LayoutError.
    """
    _check_blocks(blocks, records)
    backend(blocks.kv, records.kv).copy_blocks(blocks, records)


def load(records: Blocks, blocks: Blocks) -> None:
    """Copy records of the arena back to blocks of a cache; raises like ``spill``."""
    _check_blocks(blocks, records)
    backend(records.kv, blocks.kv).copy_blocks(records, blocks)


def splice(source: PagedKv, target: PagedKv, slots: SlotMap, rope: Rope) -> None:
    """Copy tokens to other positions, K rotated by Δ; see ``reference.splice``.
    Raises SlotError or LayoutError.
    """
    _check(source, slots.source, source.layout.slots, "slot", lowest=None)
    _check(target, slots.target, target.layout.slots, "slot", lowest=None)
    _check_pairs(*slots)
    backend(source, target).splice(source, target, slots, rope)


def backend(*memories: PagedKv) -> Backend:
    """Return what moves bytes between memories; raises BuildError or KernelError."""
    return fastest(any(kv.memory.is_cuda for kv in memories))


def observer(cache: PagedKv) -> Observer:
    """Return what reads a step's attention in this memory; raises as ``backend``."""
    return device if cache.memory.is_cuda else attention


def chosen() -> str:
    """Return which back ends the environment asks for, one of ``CHOICES``; raises KernelError."""
    text = os.environ.get(SWITCH, "").strip() or "auto"
    if text not in CHOICES:
        raise KernelError(f"{SWITCH}={text!r} is not known; allowed: {', '.join(CHOICES)}")
    return text


@functools.cache
def fastest(on_gpu: bool) -> Backend:
    """Return the back end for memory on a GPU or on the host; the variable is read at the first
    call. Raises KernelError.
    """
    if chosen() == "reference":
        return reference
    if on_gpu:
        return device
    return reference if native_problem() else native


@functools.cache
def native_problem() -> str | None:
    """Describe why host memory is moved by torch, not compiled C++; None if it is compiled."""
    try:
        native.library()
    except BuildError as error:
        return str(error)
    return None


def brought(cache: PagedKv, numbers: Tensor) -> Tensor:
    """Return a small host tensor's copy on the cache's device, without waiting for the GPU."""
    if not cache.memory.is_cuda:
        return numbers
    return uploaded((numbers,), str(cache.memory.device))[0]


def _check_blocks(blocks: Blocks, records: Blocks) -> None:
    _check(*blocks, blocks.layout.blocks, "block")
    _check(*records, records.layout.blocks, "record")
    _check_pairs(blocks.numbers, records.numbers)


def _check(kv: PagedKv, numbers: Tensor, limit: int, what: str, lowest: int | None = 0) -> None:
    """Refuse numbers out of range; those on a GPU are trusted: reading them would wait for it."""
    if numbers.is_cuda or not numbers.numel():
        return
    smallest, largest = (int(value) for value in numbers.aminmax())
    if largest >= limit or (lowest is not None and smallest < lowest):
        raise SlotError(
            f"{what} {largest if largest >= limit else smallest} of {kv.layout.name}; "
            f"allowed: 0 to {limit - 1}"
        )


def _check_pairs(*lists: Tensor) -> None:
    lengths = {int(numbers.numel()) for numbers in lists}
    if len(lengths) > 1:
        raise SlotError(f"lists that belong together have lengths {sorted(lengths)}")


def mixed_attention(
    queries: Tensor, parts: Sequence[KvPart], visible: Tensor | None, scale: float
) -> AttentionResult:
    """Attend to tokens stored in parts, by compiled C++ if possible; see ``backends.mixed``."""
    if mixed.serves(queries, parts) and _is_compiled():
        threads = torch.get_num_threads()
        return mixed.native_mixed_attention(queries, parts, visible, scale, threads)
    return mixed.mixed_attention(queries, parts, visible, scale)


@functools.cache
def _is_compiled() -> bool:
    if os.environ.get(SWITCH, "auto") == "reference":
        return False
    try:
        mixed.library()
    except BuildError:
        return False
    return True
