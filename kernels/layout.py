"""Describes where a token's K and V are in a paged cache or in the host arena.

A cache has the axes L (layers), B (blocks), H (KV heads), N (tokens of a block) and C (a token's
content in one head: K, then V). All offsets and strides here are in *elements* of ``dtype``. A
*slot* is ``block · N + token``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import torch

from .errors import LayoutError
from .tensors import Numbers, Tensor

GPU_LAYOUTS: Final = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16, torch.int8)
SCALE_BYTES: Final = 4  # an int8 cell carries an fp32 scale after its values


@dataclass(frozen=True, slots=True)
class Plane:
    """The K or V of one (layer, block, head): the position of dimension d of token n is

    ``base + (n // token_tile)·token_outer + (n % token_tile)·token_inner + (d //
    dim_tile)·dim_outer + (d % dim_tile)·dim_inner``
    """

    base: int
    dims: int  # values per token; 0 if there is no such plane (V under MLA)
    token_outer: int
    token_inner: int = 0
    token_tile: int = 1
    dim_outer: int = 1
    dim_inner: int = 0
    dim_tile: int = 1
    scale: int | None = None  # of token 0's fp32 scale; the next is `token_outer` further

    def offset(self, token: Numbers, dim: Numbers) -> Numbers:
        """Return offsets in elements from the start of the (layer, block, head); ints, numpy or
        torch.
        """
        return (
            self.base
            + token // self.token_tile * self.token_outer
            + token % self.token_tile * self.token_inner
            + dim // self.dim_tile * self.dim_outer
            + dim % self.dim_tile * self.dim_inner
        )

    @property
    def dims_adjoin(self) -> bool:
        return self.dim_tile == 1 and self.dim_outer == 1


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The layout of a paged K/V memory: a cache's, or the arena's."""

    name: str
    dtype: torch.dtype
    layers: int
    blocks: int
    heads: int
    tokens: int
    layer_stride: int
    block_stride: int
    head_stride: int
    key: Plane
    value: Plane

    @property
    def itemsize(self) -> int:
        return int(self.dtype.itemsize)

    @property
    def cell(self) -> int:
        """Elements of one token in one head, scales included."""
        return _cell(self.key, self.value)

    @property
    def interleaved(self) -> bool:
        """Whether tokens interleave in a (block, head), so that it must be copied whole."""
        return not (self.key.dims_adjoin and self.value.dims_adjoin)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers, without padding."""
        return self.layers * self.heads * self.tokens * self.cell * self.itemsize

    @property
    def slots(self) -> int:
        return self.blocks * self.tokens

    @property
    def elements(self) -> int:
        """Elements from the first to just after the last addressed one."""
        return 1 + sum(
            (extent - 1) * stride
            for extent, stride in (*self.axes(), (self.blocks, self.block_stride), (self.unit, 1))
        )

    @property
    def unit(self) -> int:
        """Elements of the smallest run that no axis divides: a cell, or a whole (block, head)."""
        return self.tokens * self.cell if self.interleaved else self.cell

    def axes(self) -> list[tuple[int, int]]:
        """(extent, stride) of L, H and, unless tokens interleave, N."""
        axes = [(self.layers, self.layer_stride), (self.heads, self.head_stride)]
        return axes if self.interleaved else [*axes, (self.tokens, self.key.token_outer)]

    def address(
        self, plane: Plane, layer: Numbers, slot: Numbers, head: Numbers, dim: Numbers
    ) -> Numbers:
        """Return the element offset of one value; arguments broadcast like numpy or torch
        integers.
        """
        page = slot // self.tokens * self.block_stride + layer * self.layer_stride
        return page + head * self.head_stride + plane.offset(slot % self.tokens, dim)

    def scale_address(self, plane: Plane, layer: Numbers, slot: Numbers, head: Numbers) -> Numbers:
        """Return the element offset of an int8 cell's fp32 scale; raises LayoutError."""
        if plane.scale is None:
            raise LayoutError(f"{self.name}: {self.dtype} cells have no scale")
        page = slot // self.tokens * self.block_stride + layer * self.layer_stride
        return page + head * self.head_stride + plane.scale + slot % self.tokens * plane.token_outer

    def record(self, blocks: int) -> KvLayout:
        """Return the arena's layout: blocks outermost and contiguous, inner order kept."""
        strides = _compact([stride for _, stride in self.axes()], self.axes(), self.unit)
        size = math.prod(extent for extent, _ in self.axes()) * self.unit
        key, value = self.key, self.value
        if not self.interleaved:
            key = replace(key, token_outer=strides[2])
            value = replace(value, token_outer=strides[2])
        return replace(
            self, name=f"{self.name} record", blocks=blocks, block_stride=size,
            layer_stride=strides[0], head_stride=strides[1], key=key, value=value,
        )  # fmt: skip

    def int8_record(self, blocks: int) -> KvLayout:
        """Return the arena's layout of int8 copies: [B, L, H, N, K, scale, V, scale]."""
        return gpu_layout(
            "BLHNC", self.layers, blocks, self.heads, self.tokens,
            self.key.dims, self.value.dims, torch.int8,
        )  # fmt: skip


class PagedKv(NamedTuple):
    """A memory with its layout."""

    memory: Tensor  # 1-D, of `layout.dtype`; element 0 is layer 0, block 0, head 0
    layout: KvLayout


def gpu_layout(
    order: str, layers: int, blocks: int, heads: int, tokens: int, head_dim: int,
    value_dim: int | None = None, dtype: torch.dtype = torch.bfloat16,
) -> KvLayout:  # fmt: skip
    """Return one of vLLM's packed cache layouts; ``order`` names its axes from outer to inner.

    With ``dtype=torch.int8`` cells are vLLM's ``int8_per_token_head``: K, fp32, V, fp32. MLA is
    ``heads=1, head_dim=576, value_dim=0``. Raises LayoutError.
    """
    if order not in GPU_LAYOUTS:
        raise LayoutError(f"layout {order!r} is not known; allowed: {', '.join(GPU_LAYOUTS)}")
    key, value = packed_planes(head_dim, head_dim if value_dim is None else value_dim, dtype)
    cell = _cell(key, value)
    extents = {"L": layers, "B": blocks, "H": heads, "N": tokens}
    strides, step = {}, cell
    for axis in reversed(order[:-1]):
        strides[axis] = step
        step *= extents[axis]
    return KvLayout(
        order, dtype, layers, blocks, heads, tokens,
        strides["L"], strides["B"], strides["H"],
        replace(key, token_outer=strides["N"]), replace(value, token_outer=strides["N"]),
    )  # fmt: skip


def new_memory(layout: KvLayout) -> PagedKv:
    """Return zeroed host memory of this layout."""
    return PagedKv(torch.zeros(layout.elements, dtype=layout.dtype), layout)


def packed_planes(key_dims: int, value_dims: int, dtype: torch.dtype) -> tuple[Plane, Plane]:
    """Return a token's K and V planes, int8 with scales; callers set token strides."""
    check_dtype(dtype)
    if dtype != torch.int8:
        return Plane(0, key_dims, 0), Plane(key_dims, value_dims, 0)
    if key_dims % SCALE_BYTES or value_dims % SCALE_BYTES:
        raise LayoutError(
            f"int8 cells need head sizes that are multiples of {SCALE_BYTES}; "
            f"got {key_dims} for K and {value_dims} for V"
        )
    start = key_dims + SCALE_BYTES
    value_scale = start + value_dims if value_dims else None
    return Plane(0, key_dims, 0, scale=key_dims), Plane(start, value_dims, 0, scale=value_scale)


def check_dtype(dtype: torch.dtype) -> None:
    """Raise ``LayoutError`` for a dtype that no supported cache has."""
    if dtype not in DTYPES:
        raise LayoutError(f"dtype {dtype} is not known; allowed: {', '.join(map(str, DTYPES))}")


def _cell(key: Plane, value: Plane) -> int:
    scales = sum(SCALE_BYTES for plane in (key, value) if plane.scale is not None)
    return key.dims + value.dims + scales


def _compact(strides: list[int], axes: Sequence[tuple[int, int]], unit: int) -> list[int]:
    packed, step = [0] * len(axes), unit
    # An axis of extent 1 may carry any stride; by extent first, it sorts behind its equals.
    for i in sorted(range(len(axes)), key=lambda i: (strides[i], axes[i][0])):
        packed[i] = step
        step *= axes[i][0]
    return packed


class Blocks(NamedTuple):
    kv: PagedKv  # an engine's cache, or an arena, whose blocks are its records
    numbers: Tensor  # int64 [n]; no duplicates if blocks are written

    @property
    def layout(self) -> KvLayout:
        return self.kv.layout


class SlotMap(NamedTuple):
    """Which token slot is copied to which, and by how much its position moves; each int64 [T]."""

    source: Tensor  # slots of the source memory; a pair with a negative slot is skipped
    target: Tensor  # slots of the target memory; no duplicates
    delta: Tensor  # Δ: new position minus old, in tokens

    def kept(self) -> SlotMap:
        keep = (self.source >= 0) & (self.target >= 0)
        return SlotMap(*(column[keep] for column in self))
