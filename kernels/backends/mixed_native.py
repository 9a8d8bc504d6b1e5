"""The fast path of ``mixed_attention`` for a decode step on the CPU: one query a head, in C++."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch

from ..compilers.gxx import load_library
from ..tensors import Tensor
from .mixed_attention import Attended, Part

SOURCE: Final = Path(__file__).parents[1] / "cpu" / "mixed.cpp"
# Sums may run in any order and products may be fused: equal to rounding is what is promised.
OPTIONS: Final = [
    "-O3", "-march=native", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math",
    "-mprefer-vector-width=512",
]  # fmt: skip
# Below this many numbers read, a second thread costs more than it brings; chosen.
PARALLEL_NUMBERS: Final = 1 << 20

_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64


class PartArgs(ctypes.Structure):
    """``Part`` of mixed.cpp."""

    _fields_ = (
        ("keys", _POINTER), ("values", _POINTER), ("key_scale", _POINTER),
        ("value_scale", _POINTER), ("tokens", _NUMBER), ("batch_stride", _NUMBER),
        ("head_stride", _NUMBER), ("token_stride", _NUMBER), ("is_int8", _NUMBER),
    )  # fmt: skip


class MixedArgs(ctypes.Structure):
    """The arguments of ``mixed_attention`` of mixed.cpp."""

    _fields_ = (
        ("queries", _POINTER), ("parts", ctypes.POINTER(PartArgs)), ("visible", _POINTER),
        ("output", _POINTER), ("mass", _POINTER), ("n_parts", _NUMBER), ("batch", _NUMBER),
        ("heads", _NUMBER), ("kv_heads", _NUMBER), ("dims", _NUMBER), ("tokens", _NUMBER),
        ("threads", _NUMBER), ("scale", ctypes.c_double),
    )  # fmt: skip


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled operation.

    Raises:
        BuildError: It cannot be compiled here.
    """
    loaded = load_library("mixed", [SOURCE], OPTIONS)
    loaded.mixed_attention.argtypes = [ctypes.POINTER(MixedArgs)]
    loaded.mixed_attention.restype = None
    return loaded


def serves(queries: Tensor, parts: Sequence[Part]) -> bool:
    """Whether the compiled path can: one float32 query a head, and parts as a store holds them."""
    return (
        queries.shape[2] == 1
        and queries.device.type == "cpu"
        and queries.dtype == torch.float32
        and all(_fits(part) for part in parts)
    )


def mixed_attention(
    queries: Tensor, parts: Sequence[Part], visible: Tensor | None, scale: float, threads: int = 1
) -> Attended:
    """``mixed_attention.mixed_attention`` of one query a head; see ``serves``."""
    batch, heads, _, dims = queries.shape
    kv_heads = parts[0].keys.shape[1]
    tokens = sum(part.keys.shape[2] for part in parts)
    queries = queries.contiguous()
    output = torch.empty_like(queries)
    mass = torch.empty((batch, kv_heads, tokens), dtype=torch.float32)
    seen = None if visible is None else visible[:, 0].contiguous()
    packed = (PartArgs * len(parts))(*(_packed(part) for part in parts))
    parallel = batch * kv_heads * tokens * dims >= PARALLEL_NUMBERS
    library().mixed_attention(MixedArgs(
        queries=queries.data_ptr(), parts=packed,
        visible=None if seen is None else seen.data_ptr(), output=output.data_ptr(),
        mass=mass.data_ptr(), n_parts=len(parts), batch=batch, heads=heads, kv_heads=kv_heads,
        dims=dims, tokens=tokens, threads=threads if parallel else 1, scale=scale,
    ))  # fmt: skip
    return Attended(output, (mass.sum(1) / heads)[:, None])


def _fits(part: Part) -> bool:
    keys, values = part.keys, part.values
    return (
        keys.dtype in (torch.float32, torch.int8)
        and keys.dtype == values.dtype
        and keys.shape == values.shape
        and keys.stride() == values.stride()
        and keys.stride(3) == 1
        and (part.key_scale is None or part.key_scale.is_contiguous())
        and (part.value_scale is None or part.value_scale.is_contiguous())
    )


def _packed(part: Part) -> PartArgs:
    keys = part.keys
    return PartArgs(
        keys=keys.data_ptr(), values=part.values.data_ptr(),
        key_scale=None if part.key_scale is None else part.key_scale.data_ptr(),
        value_scale=None if part.value_scale is None else part.value_scale.data_ptr(),
        tokens=keys.shape[2], batch_stride=keys.stride(0), head_stride=keys.stride(1),
        token_stride=keys.stride(2), is_int8=keys.dtype == torch.int8,
    )  # fmt: skip
