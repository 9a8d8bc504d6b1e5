"""The fast path for memory on the CPU: ``reference``'s operations in C++, with the same bits.

The library is compiled by the machine's own compiler when the first operation is asked for.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Final

import numpy as np
import torch

from ..compilers.gxx import load_library
from ..layout.block_runs import block_runs, check_same_model
from ..layout.layout import KvLayout, PagedKv, Plane
from ..layout.slot_runs import SlotRuns, slot_runs
from ..maths.rope import Rope
from ..tensors import Int64s, Tensor

SOURCE: Final = Path(__file__).parents[1] / "cpu" / "paged.cpp"
OPTIONS: Final = ["-O3", "-march=native", "-ffp-contract=off"]
# Below this a second thread costs more than it brings.
PARALLEL_BYTES: Final = 4 << 20
_TYPES: Final = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int8: 3}


class _RopeArgs(ctypes.Structure):
    """Mirrors ``Rope`` in paged.cpp."""

    _fields_ = (
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("start", ctypes.c_int64),
        ("pairs", ctypes.c_int64),
        ("neox", ctypes.c_int64),
    )


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled operations.

    Raises:
        BuildError: They cannot be compiled here.
    """
    loaded = load_library("paged", [SOURCE], OPTIONS)
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    loaded.kv_copy.argtypes = [pointer, pointer, pointer, pointer, number, number, number]
    loaded.kv_move.argtypes = [
        pointer, pointer, number, pointer, pointer, number, pointer, number, pointer, number,
        number,
    ]  # fmt: skip
    loaded.kv_copy.restype = loaded.kv_move.restype = None
    return loaded


def prepare(cache: PagedKv, arena: PagedKv) -> None:
    """Compile the library."""
    library()


def spill(
    cache: PagedKv, blocks: Tensor, arena: PagedKv, records: Tensor, threads: int = 1
) -> None:
    """``reference.spill``."""
    _copy_blocks(cache, blocks, arena, records, threads)


def warm(arena: PagedKv, records: Tensor, cache: PagedKv, blocks: Tensor, threads: int = 1) -> None:
    """``reference.warm``."""
    _copy_blocks(arena, records, cache, blocks, threads)


def splice(
    source: PagedKv, source_slots: Tensor, target: PagedKv, target_slots: Tensor, delta: Tensor,
    rope: Rope, threads: int = 1,
) -> None:  # fmt: skip
    """``reference.splice``."""
    check_same_model(source.layout, target.layout)
    runs = slot_runs(source_slots, target_slots, delta, source.layout.tokens)
    _move(source, target, runs, rope, threads)


def rotate_in_place(
    cache: PagedKv, slots: Tensor, delta: Tensor, rope: Rope, threads: int = 1
) -> None:
    """``reference.rotate_in_place``."""
    runs = slot_runs(slots, slots, delta, cache.layout.tokens)
    turned = runs.runs[runs.runs[:, 3] >= 0]
    _move(cache, cache, SlotRuns(turned, runs.deltas), rope, threads, keys_only=True)


def _copy_blocks(
    source: PagedKv, blocks: Tensor, target: PagedKv, others: Tensor, threads: int
) -> None:
    runs = block_runs(source.layout, blocks, target.layout, others)
    count = len(runs.sources)
    library().kv_copy(
        source.memory.data_ptr(), target.memory.data_ptr(), runs.sources.ctypes.data,
        runs.targets.ctypes.data, count, runs.size, _threads(threads, count * runs.size),
    )  # fmt: skip


def _move(
    source: PagedKv, target: PagedKv, runs: SlotRuns, rope: Rope, threads: int,
    keys_only: bool = False,
) -> None:  # fmt: skip
    cos, sin = (table.contiguous() for table in rope.rotation(runs.deltas))
    turn = _RopeArgs(
        cos.data_ptr(), sin.data_ptr(), rope.start, rope.dims // 2, rope.pairing.value == "neox"
    )
    layouts = packed(source.layout), packed(target.layout)
    moved = int(runs.runs[:, 2].sum()) * source.layout.block_bytes // source.layout.tokens
    library().kv_move(
        source.memory.data_ptr(), layouts[0].ctypes.data, _TYPES[source.layout.dtype],
        target.memory.data_ptr(), layouts[1].ctypes.data, _TYPES[target.layout.dtype],
        runs.runs.ctypes.data, len(runs.runs), ctypes.byref(turn), keys_only,
        _threads(threads, moved),
    )  # fmt: skip


@functools.lru_cache(maxsize=64)
def packed(layout: KvLayout) -> Int64s:
    """A layout as the kernels read it: int64 [24], in elements."""
    head = [
        layout.layers, layout.heads, layout.tokens,
        layout.layer_stride, layout.block_stride, layout.head_stride,
    ]  # fmt: skip
    return np.array([*head, *_packed_plane(layout.key), *_packed_plane(layout.value)], np.int64)


def _packed_plane(plane: Plane) -> list[int]:
    return [
        plane.base, plane.dims, plane.token_outer, plane.token_inner, plane.token_tile,
        plane.dim_outer, plane.dim_inner, plane.dim_tile,
        -1 if plane.scale is None else plane.scale,
    ]  # fmt: skip


def _threads(threads: int, size: int) -> int:
    return threads if size >= PARALLEL_BYTES else 1
