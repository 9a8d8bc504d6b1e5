"""Spill, load, splice and rotate in plain torch on any device; other back ends must give equal
results. Each operation uses the layout's address functions, layer by layer, all tokens at once.
"""

from __future__ import annotations

from typing import TypeAlias

import torch

from ..layout import Blocks, KvLayout, PagedKv, Plane, SlotMap
from ..quant import dequantize, quantize
from ..rope import Rope
from ..runs import check_same_model, copy_plan
from ..tensors import Tensor

Turn: TypeAlias = tuple[Rope, Tensor, Tensor]  # with cos and sin of each token's angles
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def prepare(cache: PagedKv, arena: PagedKv) -> None:
    """Does nothing: torch needs no preparation."""


def copy_blocks(source: Blocks, target: Blocks) -> None:
    """Copy whole blocks, byte for byte, between a cache and records in its ``layout.record(…)``.
    Raises LayoutError.
    """
    plan = copy_plan(source.layout, target.layout)
    extents = [extent for extent, _, _ in plan.axes]
    views = []
    for (kv, _), which in ((source, 1), (target, 2)):
        layout = kv.layout
        strides = [layout.block_stride, *(axis[which] for axis in plan.axes), 1]
        bits = kv.memory.view(_BITS[layout.itemsize])
        views.append(bits.as_strided((layout.blocks, *extents, plan.run), strides))
    views[1][target.numbers] = views[0][source.numbers]


def splice(source: PagedKv, target: PagedKv, slots: SlotMap, rope: Rope) -> None:
    """Copy tokens to other positions: K rotated by Δ in fp32, V unchanged.

    Where the dtypes differ, values are converted: int8 cells are dequantised when read and
    quantised when written. A token with Δ = 0 and equal dtypes is copied bit for bit.
    Raises LayoutError.
    """
    check_same_model(source.layout, target.layout)
    taken, given, delta = slots.kept()
    cos, sin = rope.rotation(delta)
    for layer in range(source.layout.layers):
        _move_plane(source, taken, target, given, layer, "value", None)
        still = delta == 0
        _move_plane(source, taken[still], target, given[still], layer, "key", None)
        turned = ~still
        turn = (rope, cos[turned], sin[turned])
        _move_plane(source, taken[turned], target, given[turned], layer, "key", turn)


def read_plane(kv: PagedKv, plane: Plane, layer: int, slots: Tensor) -> Tensor:
    """Return K or V of tokens in float32, dequantised, [T, heads, dims]."""
    values = kv.memory[addresses(kv.layout, plane, layer, slots)]
    if plane.scale is None:
        return values.to(torch.float32)
    return dequantize(values, _scales(kv)[_scale_addresses(kv.layout, plane, layer, slots)])


def write_plane(kv: PagedKv, plane: Plane, layer: int, slots: Tensor, values: Tensor) -> None:
    """Store float32 values [T, heads, dims], rounded to the memory's dtype or quantised."""
    at = addresses(kv.layout, plane, layer, slots)
    if plane.scale is None:
        kv.memory[at] = values.to(kv.memory.dtype)
        return
    cells, scales = quantize(values)
    kv.memory[at] = cells
    _scales(kv)[_scale_addresses(kv.layout, plane, layer, slots)] = scales


def _move_plane(
    source: PagedKv, taken: Tensor, target: PagedKv, given: Tensor, layer: int, name: str,
    turn: Turn | None,
) -> None:  # fmt: skip
    plane, other = getattr(source.layout, name), getattr(target.layout, name)
    if plane.dims == 0 or taken.numel() == 0:
        return
    if turn is None and source.layout.dtype == target.layout.dtype:
        _copy_tokens(source, plane, taken, target, other, given, layer)
        return
    values = read_plane(source, plane, layer, taken)
    if turn is not None:
        rope, cos, sin = turn
        values = rope.rotate(values, cos, sin)
    write_plane(target, other, layer, given, values)


def _copy_tokens(
    source: PagedKv, plane: Plane, taken: Tensor, target: PagedKv, other: Plane, given: Tensor,
    layer: int,
) -> None:  # fmt: skip
    """Copy bit for bit, as integers, so that no NaN changes."""
    bits = _BITS[source.layout.itemsize]
    values = source.memory.view(bits)[addresses(source.layout, plane, layer, taken)]
    target.memory.view(bits)[addresses(target.layout, other, layer, given)] = values
    if plane.scale is not None:
        scales = _scales(source)[_scale_addresses(source.layout, plane, layer, taken)]
        _scales(target)[_scale_addresses(target.layout, other, layer, given)] = scales


def addresses(layout: KvLayout, plane: Plane, layer: int, slots: Tensor) -> Tensor:
    """Return indices into the memory of tokens' K or V in one layer, int64 [T, heads, dims]."""
    heads = torch.arange(layout.heads, device=slots.device)[None, :, None]
    dims = torch.arange(plane.dims, device=slots.device)[None, None, :]
    return layout.address(plane, layer, slots[:, None, None], heads, dims)


def _scale_addresses(layout: KvLayout, plane: Plane, layer: int, slots: Tensor) -> Tensor:
    """Indices into the memory viewed as float32."""
    heads = torch.arange(layout.heads, device=slots.device)[None, :]
    return layout.scale_address(plane, layer, slots[:, None], heads) // 4


def _scales(kv: PagedKv) -> Tensor:
    whole = kv.memory.numel() // 4 * 4
    return kv.memory[:whole].view(torch.float32)
