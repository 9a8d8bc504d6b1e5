"""Attention over tokens stored in parts, some of them in int8, tile by tile. An int8 part has one
scale per head and channel, so that K's scales multiply the queries, V's the sum.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import torch

from ..compilers import load_library
from ..tensors import Tensor

TILE = 256  # tokens processed together; chosen: a tile of 8 heads of 64 dimensions stays in L2


class KvPart(NamedTuple):
    """Consecutive tokens of a layer, stored alike; scales, float32, exist for int8 only."""

    keys: Tensor  # [batch, kv heads, tokens, dims], floating point or int8
    values: Tensor  # [batch, kv heads, tokens, value dims], of the same type
    key_scale: Tensor | None = None  # [batch, kv heads, dims]
    value_scale: Tensor | None = None  # [batch, kv heads, value dims]


class AttentionResult(NamedTuple):
    """The output of attention, and the attention to each token."""

    output: Tensor  # [batch, query heads, queries, value dims], in the queries' type
    # float32 [batch, queries, tokens]: shares of a query's attention, averaged over heads.
    mass: Tensor


def mixed_attention(
    queries: Tensor,  # [batch, query heads, queries, dims]; query heads are a multiple of kv heads
    parts: Sequence[KvPart],  # at least one token in all
    # bool [batch, queries, tokens], or None if every query sees everything. A query that sees
    # nothing gets zeros and has no mass
    visible: Tensor | None,
    scale: float,  # factor of the logits, usually dims ** -0.5
    tile: int = TILE,  # tokens per step
) -> AttentionResult:
    """Compute softmax attention over the tokens of all parts, in order, by the online method."""
    batch, heads, count, dims = queries.shape
    kv_heads = parts[0].keys.shape[1]
    grouped = queries.to(torch.float32).reshape(batch, kv_heads, -1, dims) * scale
    running = _Running(grouped, parts[0].values.shape[-1])
    logits, first = [], 0
    for part, scaled, low, high in _tiles(parts, grouped, tile):
        seen = scaled @ part.keys[:, :, low:high].to(torch.float32).mT
        if visible is not None:
            hidden = ~visible[:, None, None, :, first : first + high - low]
            seen = seen.unflatten(2, (-1, count)).masked_fill(hidden, -torch.inf).flatten(2, 3)
        running.add(seen, part, low, high)
        logits.append(seen)
        first += high - low
    mass = running.weights(torch.cat(logits, -1)).reshape(batch, heads, count, -1).mean(1)
    output = running.result().reshape(batch, heads, count, -1)
    return AttentionResult(output.to(queries.dtype), mass)


def observed_mass(queries: Tensor, keys: Tensor, visible: Tensor | None, scale: float) -> Tensor:
    """Return only the mass of ``AttentionResult``, for keys [batch, kv heads, tokens, dims] in one
    part.
    """
    batch, heads, count, dims = queries.shape
    grouped = queries.to(torch.float32).reshape(batch, keys.shape[1], -1, dims) * scale
    seen = (grouped @ keys.to(torch.float32).mT).reshape(batch, heads, count, -1)
    if visible is None:
        return seen.softmax(-1).mean(1)
    seen = seen.masked_fill(~visible[:, None], -torch.inf)
    return seen.softmax(-1).nan_to_num(nan=0.0).mean(1)


def _tiles(
    parts: Sequence[KvPart], grouped: Tensor, tile: int
) -> Iterator[tuple[KvPart, Tensor, int, int]]:
    for part in parts:
        scaled = grouped if part.key_scale is None else grouped * part.key_scale[:, :, None, :]
        for low in range(0, part.keys.shape[2], tile):
            yield part, scaled, low, min(low + tile, part.keys.shape[2])


class _Running:
    """Running maximum, sum and weighted values of the online softmax."""

    def __init__(self, grouped: Tensor, dims: int) -> None:
        self._most = grouped.new_full((*grouped.shape[:3], 1), -torch.inf)
        self._sum = torch.zeros_like(self._most)
        self._read = grouped.new_zeros((*grouped.shape[:3], dims))

    def add(self, seen: Tensor, part: KvPart, low: int, high: int) -> None:
        """Add one tile's logits [batch, kv heads, rows, tile] and its values."""
        most = torch.maximum(self._most, seen.amax(-1, keepdim=True))
        finite = most.masked_fill(most.isneginf(), 0.0)  # so that nothing seen yet stays nothing
        weight, kept = (seen - finite).exp(), (self._most - finite).exp()
        read = weight @ part.values[:, :, low:high].to(torch.float32)
        if part.value_scale is not None:
            read = read * part.value_scale[:, :, None, :]
        self._sum = self._sum * kept + weight.sum(-1, keepdim=True)
        self._read = self._read * kept + read
        self._most = most

    def weights(self, logits: Tensor) -> Tensor:
        finite = self._most.masked_fill(self._most.isneginf(), 0.0)
        return (logits - finite).exp() / self._divisor()

    def result(self) -> Tensor:
        """The weighted values, [batch, kv heads, rows, value dims]."""
        return self._read / self._divisor()

    def _divisor(self) -> Tensor:
        return self._sum.masked_fill(self._sum == 0.0, 1.0)


SOURCE: Final = Path(__file__).parents[1] / "cpu" / "mixed.cpp"
# Sums may run in any order and products may be fused: results are equal up to rounding.
OPTIONS: Final = [
    "-O3", "-march=native", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math",
    "-mprefer-vector-width=512",
]  # fmt: skip
# For fewer numbers read, a second thread costs more than it gains; chosen.
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
    loaded = load_library("mixed", [SOURCE], OPTIONS)
    loaded.mixed_attention.argtypes = [ctypes.POINTER(MixedArgs)]
    loaded.mixed_attention.restype = None
    return loaded


def serves(queries: Tensor, parts: Sequence[KvPart]) -> bool:
    """Return whether compiled C++ can do it: one float32 query per head, and parts as stores hold
    them.
    """
    return (
        queries.shape[2] == 1
        and queries.device.type == "cpu"
        and queries.dtype == torch.float32
        and all(_fits(part) for part in parts)
    )


def native_mixed_attention(
    queries: Tensor, parts: Sequence[KvPart], visible: Tensor | None, scale: float, threads: int = 1
) -> AttentionResult:
    """Compute ``mixed_attention`` of one query per head in C++; see ``serves``."""
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
    return AttentionResult(output, (mass.sum(1) / heads)[:, None])


def _fits(part: KvPart) -> bool:
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


def _packed(part: KvPart) -> PartArgs:
    keys = part.keys
    return PartArgs(
        keys=keys.data_ptr(), values=part.values.data_ptr(),
        key_scale=None if part.key_scale is None else part.key_scale.data_ptr(),
        value_scale=None if part.value_scale is None else part.value_scale.data_ptr(),
        tokens=keys.shape[2], batch_stride=keys.stride(0), head_stride=keys.stride(1),
        token_stride=keys.stride(2), is_int8=keys.dtype == torch.int8,
    )  # fmt: skip
