"""Layouts of engines' own caches: from their views, and the interleavings of vLLM's CPU backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final

import torch

from .errors import LayoutError
from .layout import SCALE_BYTES, KvLayout, PagedKv, Plane, check_dtype, packed_planes
from .tensors import Tensor

CPU_ISAS: Final = ("vec", "vec16", "amx")


def cpu_layout(
    isa: str, layers: int, blocks: int, heads: int, tokens: int, head_dim: int,
    dtype: torch.dtype = torch.bfloat16,
) -> KvLayout:  # fmt: skip
    """Return vLLM's CPU cache layout: LBHNC, K and V interleaved. Raises LayoutError."""
    key, value = _cpu_planes(isa, tokens, head_dim)
    page = 2 * tokens * head_dim
    check_dtype(dtype)
    if dtype == torch.int8:
        raise LayoutError("the CPU backend has no int8 cells; allowed: float dtypes")
    return KvLayout(
        f"cpu-{isa}", dtype, layers, blocks, heads, tokens,
        blocks * heads * page, heads * page, page, key, value,
    )  # fmt: skip


def from_views(
    views: Sequence[Tensor],  # one tensor per layer, in order, over one allocation
    isa: str | None = None,  # the CPU backend's instruction set (`cpu_isa`); None for a GPU layout
    mla: bool = False,  # whether a cell is one latent vector without a V
    # tokens of a block as the engine counts blocks; None if N says so. Attention that takes smaller
    # blocks has views of parts, and the described blocks are whole ones
    tokens: int | None = None,
) -> PagedKv:
    """Describe an engine's per-layer cache views [B, H, N, C], as vLLM hands them to a connector.
    Raises LayoutError.
    """
    views = views if tokens is None else [_whole_blocks(view, tokens) for view in views]
    first = views[0]
    blocks, heads, each, cell = first.shape
    offsets = [int(view.storage_offset()) for view in views]
    steps = {after - before for before, after in pairwise(offsets)}
    storages = {view.untyped_storage().data_ptr() for view in views}
    if len(storages) > 1 or len(steps) > 1 or any(v.stride() != first.stride() for v in views):
        raise LayoutError(
            f"{len(views)} layer caches are not evenly spaced in one allocation; describe each"
            " evenly spaced group on its own"
        )
    if first.stride(3) != 1:
        raise LayoutError(f"a cell's elements have stride {first.stride(3)}; it must be 1")
    key, value = _view_planes(first, isa, mla, each, cell)
    layout = KvLayout(
        f"cpu-{isa}" if isa else "view", first.dtype, len(views), blocks, heads, each,
        steps.pop() if steps else blocks * first.stride(0), first.stride(0), first.stride(1),
        key, value,
    )  # fmt: skip
    base = min(views, key=lambda view: int(view.storage_offset()))
    if base is not first:
        raise LayoutError("layers stand in descending order; pass the views in order of address")
    return PagedKv(torch.as_strided(first, (layout.elements,), (1,)), layout)


def cpu_isa(dtype: torch.dtype, tokens: int, head_dim: int) -> str:
    """Return the instruction set, which fixes the interleaving, that vLLM takes on x86."""
    if head_dim % 32 != 0 and head_dim % 16 == 0:
        return "vec16"
    if torch.cpu._is_amx_tile_supported() and dtype == torch.bfloat16 and tokens % 32 == 0:
        return "amx"
    return "vec" if tokens % 32 == 0 else "vec16"


def _whole_blocks(view: Tensor, tokens: int) -> Tensor:
    """A view [B, H, tokens, C] of whole blocks, given one of parts [B · parts, H, N, C]."""
    rows, heads, each, cell = view.shape
    parts, rest = divmod(tokens, each)
    if parts == 1 and not rest:
        return view
    block, head, token, _ = view.stride()
    fits = parts and not rest and rows % parts == 0
    if fits and each * token == block:
        shape = rows // parts, heads, tokens, cell
    elif fits and heads * head == block:
        # Heads stand outside of tokens: the bytes are a block's, which is what copies need, though
        # a head here is not one of the model's.
        shape = rows // parts, heads * parts, each, cell
    else:
        raise LayoutError(
            f"blocks of {tokens} tokens in a cache of {rows} parts of {each}: they do not adjoin"
        )
    return view.as_strided(shape, (parts * block, head, token, 1))


def _view_planes(
    view: Tensor, isa: str | None, mla: bool, tokens: int, cell: int
) -> tuple[Plane, Plane]:
    if isa is not None:
        if view.stride(2) != cell or view.stride(1) != tokens * cell:
            raise LayoutError("the CPU backend's (block, head) must be one run")
        return _cpu_planes(isa, tokens, cell // 2)
    scales = 2 * SCALE_BYTES if view.dtype == torch.int8 else 0
    dims = cell if mla else (cell - scales) // 2
    key, value = packed_planes(dims, 0 if mla else dims, view.dtype)
    step = view.stride(2)
    return replace(key, token_outer=step), replace(value, token_outer=step)


def _cpu_planes(isa: str, tokens: int, dims: int) -> tuple[Plane, Plane]:
    base = tokens * dims
    match isa:
        case "vec" | "vec16":  # K column-major, V row-major
            return Plane(0, dims, 1, dim_outer=tokens), Plane(base, dims, dims)
        case "amx" if tokens % 32 == 0 and dims % 32 == 0:  # tiles that TDPBF16PS reads
            key = Plane(0, dims, 16 * dims, 2, 16, dim_outer=32, dim_inner=1, dim_tile=2)
            value = Plane(base, dims, 32, 1, 2, dim_outer=16 * tokens, dim_inner=2, dim_tile=16)
            return key, value
        case "amx":
            raise LayoutError(f"amx needs multiples of 32; got {tokens} tokens of {dims}")
    raise LayoutError(f"instruction set {isa!r} is not known; allowed: {', '.join(CPU_ISAS)}")
