"""One launch of a CUDA kernel: which, compiled how, over what grid, with which arguments.

The same call runs on a GPU (``device``) and, for tests, on a CPU (``emulation``).
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch

from ..errors import LayoutError, SlotError
from ..layout.block_runs import Runs, block_runs, check_same_model
from ..layout.layout import KvLayout, PagedKv
from ..maths.rope import Rope
from .upload import uploaded

WARP: Final = 32
STAGES: Final = 4  # kStages of kv_move.cu and kv_copy.cu
PIECE: Final = 2048  # kPiece of kv_copy.cu
THREADS: Final = 256
SHARED_LIMIT: Final = 48 << 10  # what a thread block has without an attribute of its kernel
COUNT_LIMIT: Final = 1 << 31
DEFAULT_GRID: Final = 32  # few thread blocks saturate the bus; the rest of the GPU computes
RESIDENT_GRID: Final = 128  # the GPU's own memory wants many
_PER_TOKEN: Final = (4, 5, 6)  # kv_move's arguments with an int64 a token: slots, slots, rows
_TOKENS: Final = 9  # and the one that counts them
CXX_TYPES: Final = {
    torch.float32: "float",
    torch.float16: "Half",
    torch.bfloat16: "Bf16",
    torch.int8: "Int8",
}


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
    args: tuple[Any, ...]
    held: tuple[Any, ...]

    @property
    def shared_to_ask_for(self) -> int:
        """What the kernel's attribute must allow before this launch; 0 if it does by itself."""
        return self.shared if self.shared > SHARED_LIMIT else 0


def move_call(
    source: PagedKv, source_slots: Any, target: PagedKv, target_slots: Any, delta: Any, rope: Rope,
    keys_only: bool = False, grid: int = DEFAULT_GRID, device: str = "cpu",
) -> KernelCall:  # fmt: skip
    """``reference.splice`` as a launch; with ``keys_only``, in one memory, ``rotate_in_place``.

    Raises:
        LayoutError: The layouts hold different models, or tokens interleave, as only CPUs do it.
    """
    check_same_model(source.layout, target.layout)
    deltas, rows = torch.unique(delta, return_inverse=True)
    rows = torch.where(delta == 0, -1, rows)
    tables = rope.rotation(deltas)
    _check_count(len(delta) * source.layout.layers * source.layout.heads, "cells")
    held = uploaded(
        (cell_layout(source.layout), cell_layout(target.layout), source_slots, target_slots, rows,
         *tables),
        device,
    )  # fmt: skip
    slot_bytes = -(-source.layout.cell * source.layout.itemsize // 16) * 16
    warps = min(THREADS // WARP, SHARED_LIMIT // (STAGES * slot_bytes))
    if not warps:
        raise LayoutError(
            f"{source.layout.name}: a cell of {slot_bytes} bytes does not fit the ring"
        )
    numbers = (
        len(delta), rope.start, rope.dims // 2, rope.pairing.value == "neox", keys_only, slot_bytes
    )  # fmt: skip
    return KernelCall(
        "kv_move",
        (
            f"SOURCE_T={CXX_TYPES[source.layout.dtype]}",
            f"TARGET_T={CXX_TYPES[target.layout.dtype]}",
            f"SOURCE_BYTES={fetch_width(source)}", f"TARGET_BYTES={store_width(target)}",
        ),
        grid, warps * WARP, warps * STAGES * slot_bytes,
        (_at(source.memory), _at(target.memory), *map(_at, held), *map(_number, numbers)),
        (source.memory, target.memory, *held),
    )  # fmt: skip


def part_of(call: KernelCall, memory: Any, start: int, count: int) -> KernelCall:
    """A move of ``count`` of a call's tokens from the ``start``-th on, out of another memory."""
    args = list(call.args)
    args[0], args[_TOKENS] = _at(memory), _number(count)
    for at in _PER_TOKEN:
        args[at] = _number(args[at].value + start * 8)
    return replace(call, args=tuple(args), held=(memory, *call.held))


def copy_call(
    source: PagedKv, blocks: Any, target: PagedKv, others: Any,
    grid: int = DEFAULT_GRID, device: str = "cpu",
) -> KernelCall:  # fmt: skip
    """``reference.spill`` or ``warm`` as a launch."""
    runs = block_runs(source.layout, blocks, target.layout, others)
    return runs_call(source, target, runs, grid, device)


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
    return KernelCall(
        "kv_copy", (f"BYTES={_at_least_4(width, source.layout.name)}",), grid, THREADS,
        THREADS // WARP * STAGES * PIECE,
        (_at(source.memory), _at(target.memory), *map(_at, held), _number(len(runs.sources)),
         _number(runs.size)),
        (source.memory, target.memory, *held),
    )  # fmt: skip


def attention_mass_call(
    cache: PagedKv, layer: int, queries: Any, block_table: Any, lengths: Any, scale: float,
    device: str = "cpu",
) -> tuple[KernelCall, Any]:  # fmt: skip
    """``attention.attention_mass`` a query head; the result tensor is [S, query heads, blocks]."""
    samples, heads, _ = queries.shape
    width = block_table.shape[1]
    mass = torch.empty(samples, heads, width, dtype=torch.float32, device=device)
    given = uploaded(
        (cell_layout(cache.layout), queries.float(), block_table.long(), lengths.long()), device
    )
    tensors = (*given, mass, torch.empty_like(mass))
    paged, query, table, length, out, peaks = map(_at, tensors)
    args = (
        _at(cache.memory), paged, _number(layer), query, table, length, ctypes.c_float(scale),
        _number(heads), _number(width), out, peaks,
    )  # fmt: skip
    define = f"SOURCE_T={CXX_TYPES[cache.layout.dtype]}"
    call = KernelCall(
        "attention_mass", (define,), samples * heads, 128, 4 * 4, args, (cache.memory, *tensors)
    )
    return call, mass


def confidence_call(logits: Any) -> tuple[KernelCall, Any]:
    """``attention.confidence``; the result tensor is [rows, 3]."""
    rows, vocabulary = logits.shape
    out = torch.empty(rows, 3, dtype=torch.float32, device=logits.device)
    args = (_at(logits), _number(logits.stride(0)), _number(vocabulary), _at(out))
    define = f"SOURCE_T={CXX_TYPES[logits.dtype]}"
    return KernelCall("confidence", (define,), rows, 128, 2 * 4 * 128, args, (logits, out)), out


def cell_layout(layout: KvLayout) -> Any:
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


def fetch_width(kv: PagedKv) -> int:
    """Bytes of the widest access with which every cell can be read whole."""
    layout, size = kv.layout, kv.layout.itemsize
    strides = (layout.layer_stride, layout.block_stride, layout.head_stride, layout.cell)
    width = math.gcd(
        16, kv.memory.data_ptr(), *(stride * size for stride in strides),
        layout.key.token_outer * size,
    )  # fmt: skip
    return _at_least_4(width, layout.name)


def store_width(kv: PagedKv) -> int:
    """Bytes of the widest access with which K and V can each be written."""
    size, rows = kv.layout.itemsize, (kv.layout.key.dims, kv.layout.value.dims)
    base = kv.layout.value.base
    return _at_least_4(math.gcd(fetch_width(kv), base * size, *(r * size for r in rows)),
                       kv.layout.name)  # fmt: skip


def _at_least_4(width: int, name: str) -> int:
    if width < 4:
        raise LayoutError(f"{name}: cells are aligned to {width} bytes; kernels need 4")
    return width


def _check_count(count: int, what: str) -> None:
    """Kernels count in 32 bits: a 64-bit division costs a hundred instructions a cell."""
    if count >= COUNT_LIMIT:
        raise SlotError(f"{count} {what} in one launch; allowed: fewer than {COUNT_LIMIT}")


def _at(tensor: Any) -> Any:
    return ctypes.c_int64(tensor.data_ptr())


def _number(value: int) -> Any:
    return ctypes.c_int64(int(value))
