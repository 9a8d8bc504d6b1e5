"""``reference``'s operations in C++ for memory on the CPU, with the same bits. The library is
compiled by the machine's own compiler at the first operation.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Final

import torch

from ..compilers import load_library
from ..layout import Blocks, KvLayout, PagedKv, Plane, SlotMap
from ..rope import Rope
from ..runs import block_runs, check_same_model, slot_runs

SOURCE: Final = Path(__file__).parents[1] / "cpu" / "paged.cpp"
OPTIONS: Final = ["-O3", "-march=native", "-ffp-contract=off"]
PARALLEL_BYTES: Final = 4 << 20  # for less, a second thread costs more than it gains; chosen
MOST_THREADS: Final = 2  # that turn keys; chosen: on two idle cores, a splice takes half as long
_TYPES: Final = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int8: 3}


_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64
_PLANE: Final = (
    "base", "dims", "token_outer", "token_inner", "token_tile", "dim_outer", "dim_inner",
    "dim_tile", "scale",
)  # fmt: skip
_LAYOUT: Final = ("layers", "heads", "tokens", "layer_stride", "block_stride", "head_stride")


class PlaneArgs(ctypes.Structure):
    """``Plane`` of paged.cpp: a ``layout.Plane``; a scale of −1 stands for none."""

    _fields_ = tuple((name, _NUMBER) for name in _PLANE)


class LayoutArgs(ctypes.Structure):
    """``Layout`` of paged.cpp: a ``layout.KvLayout``, in elements."""

    _fields_ = (*((name, _NUMBER) for name in _LAYOUT), ("key", PlaneArgs), ("value", PlaneArgs))


class RopeArgs(ctypes.Structure):
    """``Rope`` of paged.cpp."""

    _fields_ = (
        ("cos", _POINTER), ("sin", _POINTER), ("start", _NUMBER), ("pairs", _NUMBER),
        ("neox", _NUMBER),
    )  # fmt: skip


class MoveArgs(ctypes.Structure):
    """The arguments of ``splice_tokens``."""

    _fields_ = (
        ("source", _POINTER), ("source_layout", ctypes.POINTER(LayoutArgs)),
        ("source_type", _NUMBER), ("target", _POINTER),
        ("target_layout", ctypes.POINTER(LayoutArgs)), ("target_type", _NUMBER),
        ("runs", _POINTER), ("n_runs", _NUMBER), ("rope", ctypes.POINTER(RopeArgs)),
        ("threads", _NUMBER),
    )  # fmt: skip


class CopyArgs(ctypes.Structure):
    """The arguments of ``copy_runs``."""

    _fields_ = (
        ("source", _POINTER), ("target", _POINTER), ("sources", _POINTER), ("targets", _POINTER),
        ("n_runs", _NUMBER), ("run_bytes", _NUMBER),
    )  # fmt: skip


@functools.cache
def library() -> ctypes.CDLL:
    loaded = load_library("paged", [SOURCE], OPTIONS)
    loaded.copy_runs.argtypes = [ctypes.POINTER(CopyArgs)]
    loaded.splice_tokens.argtypes = [ctypes.POINTER(MoveArgs)]
    loaded.copy_runs.restype = loaded.splice_tokens.restype = None
    return loaded


def prepare(cache: PagedKv, arena: PagedKv) -> None:
    library()


def copy_blocks(source: Blocks, target: Blocks) -> None:
    runs = block_runs(source, target)
    library().copy_runs(CopyArgs(
        source=source.kv.memory.data_ptr(), target=target.kv.memory.data_ptr(),
        sources=runs.sources.ctypes.data, targets=runs.targets.ctypes.data,
        n_runs=len(runs.sources), run_bytes=runs.size,
    ))  # fmt: skip


def splice(source: PagedKv, target: PagedKv, slots: SlotMap, rope: Rope) -> None:
    check_same_model(source.layout, target.layout)
    runs = slot_runs(slots, source.layout.tokens)
    cos, sin = (table.contiguous() for table in rope.rotation(runs.deltas))
    turn = RopeArgs(
        cos=cos.data_ptr(),
        sin=sin.data_ptr(),
        start=rope.start,
        pairs=rope.dims // 2,
        neox=rope.pairing.value == "neox",
    )
    moved = int(runs.runs[:, 2].sum()) * source.layout.block_bytes // source.layout.tokens
    library().splice_tokens(MoveArgs(
        source=source.memory.data_ptr(), source_layout=ctypes.pointer(packed(source.layout)),
        source_type=_TYPES[source.layout.dtype],
        target=target.memory.data_ptr(), target_layout=ctypes.pointer(packed(target.layout)),
        target_type=_TYPES[target.layout.dtype],
        runs=runs.runs.ctypes.data, n_runs=len(runs.runs), rope=ctypes.pointer(turn),
        threads=min(MOST_THREADS, torch.get_num_threads()) if moved >= PARALLEL_BYTES else 1,
    ))  # fmt: skip


@functools.lru_cache(maxsize=64)
def packed(layout: KvLayout) -> LayoutArgs:
    numbers = {name: getattr(layout, name) for name in _LAYOUT}
    return LayoutArgs(**numbers, key=_packed_plane(layout.key), value=_packed_plane(layout.value))


def _packed_plane(plane: Plane) -> PlaneArgs:
    numbers = {name: getattr(plane, name) for name in _PLANE}
    return PlaneArgs(**{**numbers, "scale": -1 if plane.scale is None else plane.scale})
