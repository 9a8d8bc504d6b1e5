"""One launch of a CUDA kernel: its name, macros, grid and arguments.

The same call runs on a GPU (``device``) and, for tests, on a CPU (``emulation``).
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch

from ..errors import LayoutError, SlotError
from ..layout.addressed import Blocks, SlotMap
from ..layout.block_runs import Runs, block_runs, check_same_model
from ..layout.layout import KvLayout, PagedKv
from ..maths.rope import Rope
from ..tensors import Tensor
from .arguments import (
    Arguments,
    ConfidenceArguments,
    CopyArguments,
    MassArguments,
    MoveArguments,
    address,
    number,
)
from .macros import (
    COMMON_DEFINES,
    PIECE,
    STAGES,
    THREADS,
    WARP,
    at_least_4,
    confidence_defines,
    mass_defines,
    move_defines,
)
from .upload import uploaded

SHARED_LIMIT: Final = 48 << 10
"""Bytes of shared memory that a thread block has without an attribute of its kernel: from the CUDA
C++ Programming Guide."""
COUNT_LIMIT: Final = 1 << 31
DEFAULT_GRID: Final = 32  # few thread blocks saturate the bus; the rest of the GPU computes; chosen
RESIDENT_GRID: Final = 128  # the GPU's own memory wants many; chosen
_READERS: Final = 256  # threads of a thread block that reads attention or logits; chosen
_FLOAT: Final = 4  # bytes
_SEEN: Final = 4 * _FLOAT  # bytes that a thread of ``confidence`` has in shared memory


@dataclass(frozen=True)
class KernelCall:
    """A launch.

    Attributes:
        defines: Macros that the kernel is compiled with, as ``-D`` takes them.
        args: ctypes values in the kernel's order.
        held: Tensors that the arguments point into.
    """

    kernel: str
    defines: tuple[str, ...]
    grid: int
    threads: int
    shared: int
    args: Arguments
    held: tuple[Tensor, ...]

    @property
    def shared_to_ask_for(self) -> int:
        """Bytes that the kernel's attribute must allow before this launch; 0 if none are needed."""
        return self.shared if self.shared > SHARED_LIMIT else 0


@dataclass(frozen=True)
class MoveCall(KernelCall):
    """A launch of ``kv_move``, which can be done in parts."""

    args: MoveArguments

    def part(
        self, start: int, count: int, source: Tensor | None = None, target: Tensor | None = None
    ) -> MoveCall:
        """A move of ``count`` tokens from the ``start``-th on, out of or into other memory."""
        args = self.args.part(start, count, source, target)
        others = tuple(memory for memory in (source, target) if memory is not None)
        return replace(self, args=args, held=(*others, *self.held))


def move_call(
    source: PagedKv, target: PagedKv, slots: SlotMap, rope: Rope, keys_only: bool = False,
    grid: int = DEFAULT_GRID, device: str = "cpu",
) -> MoveCall:  # fmt: skip
    """``reference.splice`` as a launch; with ``keys_only``, in one memory, ``rotate_in_place``.

    Raises:
        LayoutError: The layouts hold different models, or tokens interleave, as only CPUs do it.
    """
    check_same_model(source.layout, target.layout)
    deltas, rows = torch.unique(slots.delta, return_inverse=True)
    rows = torch.where(slots.delta == 0, -1, rows)
    tables = rope.rotation(deltas)
    _check_count(len(rows) * source.layout.layers * source.layout.heads, "cells")
    held = uploaded(
        (cell_layout(source.layout), cell_layout(target.layout), slots.source, slots.target, rows,
         *tables),
        device,
    )  # fmt: skip
    from_layout, to_layout, from_slots, to_slots, row_of, cos, sin = map(address, held)
    warps, slot_bytes = _ring(source.layout)
    args = MoveArguments(
        source=address(source.memory), target=address(target.memory),
        source_layout=from_layout, target_layout=to_layout,
        source_slots=from_slots, target_slots=to_slots, rows=row_of, cos=cos, sin=sin,
        tokens=number(len(rows)), start=number(rope.start), pairs=number(rope.dims // 2),
        neox=number(rope.pairing.value == "neox"), keys_only=number(keys_only),
        slot_bytes=number(slot_bytes),
    )  # fmt: skip
    return MoveCall(
        "kv_move", move_defines(source, target, rope), grid, warps * WARP,
        warps * STAGES * slot_bytes, args, (source.memory, target.memory, *held),
    )  # fmt: skip


def _ring(layout: KvLayout) -> tuple[int, int]:
    """Warps whose cells on their way fit shared memory, and the bytes that a cell takes there."""
    slot_bytes = -(-layout.cell * layout.itemsize // 16) * 16
    warps = min(THREADS // WARP, SHARED_LIMIT // (STAGES * slot_bytes))
    if not warps:
        raise LayoutError(f"{layout.name}: a cell of {slot_bytes} bytes does not fit the ring")
    return warps, slot_bytes


def copy_call(
    source: Blocks, target: Blocks, grid: int = DEFAULT_GRID, device: str = "cpu"
) -> KernelCall:
    """``reference.spill`` or ``reference.load`` as a launch."""
    return runs_call(source.kv, target.kv, block_runs(source, target), grid, device)


def runs_call(
    source: PagedKv, target: PagedKv, runs: Runs, grid: int = DEFAULT_GRID, device: str = "cpu"
) -> KernelCall:
    """Copy runs between two memories as a launch."""
    starts = [torch.from_numpy(part) for part in (runs.sources, runs.targets)]
    _check_count(len(runs.sources) * -(-runs.size // PIECE), "pieces of runs")
    width = math.gcd(
        16, runs.size, source.memory.data_ptr(), target.memory.data_ptr(),
        *(int(np.gcd.reduce(part, initial=16)) for part in (runs.sources, runs.targets)),
    )  # fmt: skip
    held = uploaded(starts, device)
    sources, targets = map(address, held)
    args = CopyArguments(
        source=address(source.memory), target=address(target.memory), sources=sources,
        targets=targets, runs=number(len(runs.sources)), run_bytes=number(runs.size),
    )  # fmt: skip
    return KernelCall(
        "kv_copy",
        (f"BYTES={at_least_4(width, source.layout.name)}", *COMMON_DEFINES),
        grid, THREADS, THREADS // WARP * STAGES * PIECE, args,
        (source.memory, target.memory, *held),
    )  # fmt: skip


def attention_mass_call(
    cache: PagedKv, layer: int, queries: Tensor, block_table: Tensor, lengths: Tensor,
    scale: float, device: str = "cpu",
) -> tuple[KernelCall, Tensor]:  # fmt: skip
    """``attention.attention_mass`` a query head; the result tensor is [S, query heads, blocks]."""
    samples, heads, _ = queries.shape
    width = block_table.shape[1]
    mass = torch.empty(samples, heads, width, dtype=torch.float32, device=device)
    given = uploaded(
        (cell_layout(cache.layout), queries.float(), block_table.long(), lengths.long()), device
    )
    tensors = (*given, mass, torch.empty_like(mass))
    paged, query, table, length, out, peaks = map(address, tensors)
    args = MassArguments(
        memory=address(cache.memory), paged=paged, layer=number(layer), queries=query, table=table,
        lengths=length, scale=ctypes.c_float(scale), query_heads=number(heads),
        width=number(width), mass=out, peaks=peaks,
    )  # fmt: skip
    call = KernelCall(
        "attention_mass", mass_defines(cache), samples * heads, _READERS,
        _READERS // WARP * _FLOAT, args, (cache.memory, *tensors),
    )  # fmt: skip
    return call, mass


def confidence_call(logits: Tensor) -> tuple[KernelCall, Tensor]:
    """``attention.confidence``; the result tensor is [rows, 3]."""
    rows, vocabulary = logits.shape
    out = torch.empty(rows, 3, dtype=torch.float32, device=logits.device)
    args = ConfidenceArguments(
        logits=address(logits), stride=number(logits.stride(0)), vocabulary=number(vocabulary),
        out=address(out),
    )  # fmt: skip
    call = KernelCall(
        "confidence", confidence_defines(logits), rows, _READERS, _READERS * _SEEN, args,
        (logits, out),
    )  # fmt: skip
    return call, out


def cell_layout(layout: KvLayout) -> Tensor:
    """A layout as ``Layout`` in common.cuh reads it: int64 [13], in bytes.

    Raises:
        LayoutError: Tokens interleave inside a block.
    """
    if layout.interleaved:
        raise LayoutError(f"{layout.name}: tokens interleave; its kernels are those of the CPU")
    size = layout.itemsize
    offsets = (layout.value.base, layout.key.scale, layout.value.scale)
    strides = (
        layout.layer_stride, layout.block_stride, layout.head_stride, layout.key.token_outer
    )  # fmt: skip
    return torch.tensor(
        [
            layout.layers, layout.heads, layout.tokens, *(stride * size for stride in strides),
            layout.key.dims, layout.value.dims,
            *(-1 if offset is None else offset * size for offset in offsets), layout.cell * size,
        ],
        dtype=torch.int64,
    )  # fmt: skip


def _check_count(count: int, what: str) -> None:
    """Refuse counts beyond 32 bits: a 64-bit division costs a hundred instructions per cell."""
    if count >= COUNT_LIMIT:
        raise SlotError(f"{count} {what} in one launch; allowed: fewer than {COUNT_LIMIT}")
