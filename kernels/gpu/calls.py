"""Builds launches of the CUDA kernels: name, macros, grid and arguments. The same call runs on a
GPU (``device``) and, for tests, on a CPU.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import torch

from ..errors import LayoutError, SlotError
from ..layout import KvLayout, PagedKv, SlotMap
from ..rope import Pairing, Rope
from ..runs import ByteRuns, check_same_model
from ..tensors import Tensor

# The arguments of each kernel are in the order of its source. All but the numbers are addresses.
Int64: TypeAlias = ctypes.c_int64
Arguments: TypeAlias = tuple[ctypes.c_int64 | ctypes.c_float, ...]


class MoveArguments(NamedTuple):
    """Arguments of ``splice_tokens``; slots, rows int64 [tokens], cos, sin float32 [*, pairs]."""

    source: Int64
    target: Int64
    source_layout: Int64
    target_layout: Int64
    source_slots: Int64
    target_slots: Int64
    rows: Int64
    cos: Int64
    sin: Int64
    tokens: Int64
    start: Int64
    pairs: Int64
    neox: Int64
    slot_bytes: Int64


class CopyArguments(NamedTuple):
    """Arguments of ``copy_runs``; sources and targets are int64 [runs], offsets in bytes."""

    source: Int64
    target: Int64
    sources: Int64
    targets: Int64
    runs: Int64
    run_bytes: Int64


class MassArguments(NamedTuple):
    """Arguments of ``attention_mass``; mass and peaks are float32 [S, query heads, width]."""

    memory: Int64
    paged: Int64
    layer: Int64
    queries: Int64
    table: Int64
    lengths: Int64
    scale: ctypes.c_float
    query_heads: Int64
    width: Int64
    mass: Int64
    peaks: Int64


class ConfidenceArguments(NamedTuple):
    """Arguments of ``confidence``; out is float32 [rows, 3]."""

    logits: Int64
    stride: Int64
    vocabulary: Int64
    out: Int64


def address(tensor: Tensor) -> Int64:
    return Int64(tensor.data_ptr())


def number(value: int) -> Int64:
    return Int64(int(value))


# Number types, access widths and sizes are passed to the compiler as macros, so that a kernel has
# no branch for what the host knows.
WARP: Final = 32  # threads per warp, on every GPU so far
THREADS: Final = 256  # of a thread block at most, so that its registers fit; chosen
STAGES: Final = 4  # cells or pieces that a warp has in flight; chosen
PIECE: Final = 2048  # bytes of a piece of a run; chosen
# Macros of every kernel; the sources contain none of these numbers themselves.
COMMON_DEFINES: Final = (
    f"WARP={WARP}", f"MOST_THREADS={THREADS}", f"STAGES={STAGES}", f"PIECE={PIECE}",
)  # fmt: skip
CXX_TYPES: Final = {
    torch.float32: "float",
    torch.float16: "Half",
    torch.bfloat16: "Bf16",
    torch.int8: "Int8",
}


def move_defines(source: PagedKv, target: PagedKv, rope: Rope) -> tuple[str, ...]:
    each = min(
        row_width(source) // source.layout.itemsize, row_width(target) // target.layout.itemsize
    )
    turn_each, pairs = _turned_at_once(rope, each)
    return (
        f"SOURCE_T={CXX_TYPES[source.layout.dtype]}", f"TARGET_T={CXX_TYPES[target.layout.dtype]}",
        f"SOURCE_BYTES={fetch_width(source)}", f"TARGET_BYTES={row_width(target)}",
        f"EACH={each}", f"TURN_EACH={turn_each}", f"PAIRS_EACH={pairs}",
        f"TURNS={-(-(rope.dims // 2) // (WARP * pairs))}", *COMMON_DEFINES,
    )  # fmt: skip


def _turned_at_once(rope: Rope, each: int) -> tuple[int, int]:
    """How many values and pairs a lane rotates at once; one where the rotation is not aligned."""
    pairs, halves = rope.dims // 2, rope.pairing is Pairing.NEOX
    whole = pairs % each == 0 if halves else each > 1 and rope.dims % each == 0
    if rope.start % each or not whole:
        return 1, 1
    return each, each if halves else each // 2


def mass_defines(cache: PagedKv) -> tuple[str, ...]:
    """Return ``attention_mass``'s macros, for the widest access to every key."""
    size = cache.layout.key.dims * cache.layout.itemsize
    width = at_least_4(math.gcd(fetch_width(cache), size), cache.layout.name)
    source = f"SOURCE_T={CXX_TYPES[cache.layout.dtype]}"
    return (source, f"BYTES={width}", f"VECTORS={size // width}", *COMMON_DEFINES)


def confidence_defines(logits: Tensor) -> tuple[str, ...]:
    """Return ``confidence``'s macros, for the widest access that rows allow."""
    width = math.gcd(16, logits.data_ptr(), logits.stride(0) * logits.itemsize)
    return (f"SOURCE_T={CXX_TYPES[logits.dtype]}", f"BYTES={width}", *COMMON_DEFINES)


def fetch_width(kv: PagedKv) -> int:
    """Return the bytes of the widest access with which every cell can be read whole."""
    layout, size = kv.layout, kv.layout.itemsize
    strides = (layout.layer_stride, layout.block_stride, layout.head_stride, layout.cell)
    width = math.gcd(
        16,
        kv.memory.data_ptr(),
        *(stride * size for stride in strides),
        layout.key.token_outer * size,
    )
    return at_least_4(width, layout.name)


def row_width(kv: PagedKv) -> int:
    """Return the bytes of the widest access with which K and V can each be read or written."""
    size, rows = kv.layout.itemsize, (kv.layout.key.dims, kv.layout.value.dims)
    base = kv.layout.value.base
    return at_least_4(
        math.gcd(fetch_width(kv), base * size, *(r * size for r in rows)), kv.layout.name
    )


def at_least_4(width: int, name: str) -> int:
    """Return ``width``, the widest access in bytes; raises ``LayoutError`` if no kernel supports
    it.
    """
    if width < 4:
        raise LayoutError(f"{name}: cells are aligned to {width} bytes; kernels need 4")
    return width


_ALIGNMENT: Final = 16  # bytes: the widest access of a kernel


def uploaded(tensors: Iterable[Tensor], device: str) -> tuple[Tensor, ...]:
    """Return the tensors contiguous on ``device``; those in host memory are copied in one pinned
    buffer.
    """
    # A copy from pageable memory would first wait for all earlier work of the stream. torch's cache
    # of pinned memory keeps the buffer until the copy is over.
    tensors = [tensor.contiguous() for tensor in tensors]
    here = [tensor for tensor in tensors if not tensor.is_cuda]
    starts, size = [], 0
    for tensor in here:
        starts.append(size)
        size += -(-tensor.numel() * tensor.itemsize // _ALIGNMENT) * _ALIGNMENT
    packed = torch.empty(size, dtype=torch.uint8, pin_memory=device != "cpu")
    for tensor, start in zip(here, starts, strict=True):
        _part(packed, start, tensor).copy_(tensor)
    there = packed.to(device, non_blocking=True)
    parts = iter([_part(there, start, tensor) for tensor, start in zip(here, starts, strict=True)])
    return tuple(tensor if tensor.is_cuda else next(parts) for tensor in tensors)


def _part(packed: Tensor, start: int, like: Tensor) -> Tensor:
    part = packed[start : start + like.numel() * like.itemsize]
    return part.view(like.dtype).view(like.shape)


# Bytes of shared memory that a thread block has without a kernel attribute, from the CUDA C++
# Programming Guide.
SHARED_LIMIT: Final = 48 << 10
COUNT_LIMIT: Final = 1 << 31
DEFAULT_GRID: Final = 32  # few thread blocks saturate the bus; the rest of the GPU computes; chosen
RESIDENT_GRID: Final = 128  # for the GPU's own memory, which needs many; chosen
_READERS: Final = 256  # threads per thread block that reads attention or logits; chosen
_FLOAT: Final = 4  # bytes
_SEEN: Final = 4 * _FLOAT  # bytes of shared memory per thread of ``confidence``


@dataclass(frozen=True)
class KernelCall:
    """A launch of a kernel."""

    kernel: str
    defines: tuple[str, ...]  # macros, as `-D` takes them
    grid: int
    threads: int
    shared: int
    args: Arguments  # in the kernel's order
    held: tuple[Tensor, ...]  # tensors that the arguments point into

    @property
    def shared_to_ask_for(self) -> int:
        """Return the bytes that the kernel's attribute must allow; 0: none."""
        return self.shared if self.shared > SHARED_LIMIT else 0


def move_call(
    source: PagedKv, target: PagedKv, slots: SlotMap, rope: Rope, grid: int = DEFAULT_GRID,
    device: str = "cpu",
) -> KernelCall:  # fmt: skip
    """``reference.splice`` as a launch; raises LayoutError."""
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
        neox=number(rope.pairing.value == "neox"),
        slot_bytes=number(slot_bytes),
    )  # fmt: skip
    return KernelCall(
        "splice_tokens", move_defines(source, target, rope), grid, warps * WARP,
        warps * STAGES * slot_bytes, args, (source.memory, target.memory, *held),
    )  # fmt: skip


def _ring(layout: KvLayout) -> tuple[int, int]:
    """How many warps' cells fit shared memory, and the bytes that a cell takes there."""
    slot_bytes = -(-layout.cell * layout.itemsize // 16) * 16
    warps = min(THREADS // WARP, SHARED_LIMIT // (STAGES * slot_bytes))
    if not warps:
        raise LayoutError(f"{layout.name}: a cell of {slot_bytes} bytes does not fit the ring")
    return warps, slot_bytes


def runs_call(
    source: PagedKv, target: PagedKv, runs: ByteRuns, grid: int = DEFAULT_GRID, device: str = "cpu"
) -> KernelCall:
    """Return copies of ``runs`` as a launch of ``copy_runs``; raises LayoutError or SlotError."""
    starts = [torch.from_numpy(part) for part in (runs.sources, runs.targets)]
    _check_count(len(runs.sources) * -(-runs.size // PIECE), "pieces of runs")
    width = math.gcd(
        16,
        runs.size,
        source.memory.data_ptr(),
        target.memory.data_ptr(),
        *(int(np.gcd.reduce(part, initial=16)) for part in (runs.sources, runs.targets)),
    )
    held = uploaded(starts, device)
    sources, targets = map(address, held)
    args = CopyArguments(
        source=address(source.memory), target=address(target.memory), sources=sources,
        targets=targets, runs=number(len(runs.sources)), run_bytes=number(runs.size),
    )  # fmt: skip
    return KernelCall(
        "copy_runs",
        (f"BYTES={at_least_4(width, source.layout.name)}", *COMMON_DEFINES),
        grid,
        THREADS,
        THREADS // WARP * STAGES * PIECE,
        args,
        (source.memory, target.memory, *held),
    )


def attention_mass_call(
    cache: PagedKv, layer: int, queries: Tensor, block_table: Tensor, lengths: Tensor,
    scale: float, device: str = "cpu",
) -> tuple[KernelCall, Tensor]:  # fmt: skip
    """Return ``attention.attention_mass`` as a launch, and its result [S, heads, blocks]."""
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
    """Return ``attention.confidence`` as a launch, and its result [rows, 3]."""
    rows, vocabulary = logits.shape
    out = torch.empty(rows, 3, dtype=torch.float32, device=logits.device)
    args = ConfidenceArguments(
        logits=address(logits),
        stride=number(logits.stride(0)),
        vocabulary=number(vocabulary),
        out=address(out),
    )
    call = KernelCall(
        "confidence", confidence_defines(logits), rows, _READERS, _READERS * _SEEN, args,
        (logits, out),
    )  # fmt: skip
    return call, out


def cell_layout(layout: KvLayout) -> Tensor:
    """Return common.cuh's ``Layout``: int64 [13], in bytes; raises LayoutError."""
    if layout.interleaved:
        raise LayoutError(f"{layout.name}: tokens interleave; its kernels are those of the CPU")
    size = layout.itemsize
    offsets = (layout.value.base, layout.key.scale, layout.value.scale)
    strides = (layout.layer_stride, layout.block_stride, layout.head_stride, layout.key.token_outer)
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
