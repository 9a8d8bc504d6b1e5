"""Keys of whole blocks, and what they say on the whole: one direction per block."""

from __future__ import annotations

import torch

from ..layout.layout import PagedKv
from ..maths.rope import Rope
from ..tensors import Tensor
from .reference import read_plane


def block_keys(cache: PagedKv, layer: int, numbers: Tensor) -> Tensor:
    """Keys of blocks, one layer: float32 [n, heads, tokens, dims], for ``numbers`` int64 [n].

    Blocks are taken by strides, all their tokens at once: with an address for each value, a long
    context would take several times as long.
    """
    layout, key = cache.layout, cache.layout.key
    if key.scale is not None:
        within = torch.arange(layout.tokens, device=numbers.device)
        slots = numbers[:, None] * layout.tokens + within[None, :]
        keys = read_plane(cache, key, layer, slots.reshape(-1))
        return keys.reshape(len(numbers), layout.tokens, layout.heads, -1).transpose(1, 2)
    tile, wide = key.token_tile, key.dim_tile
    shape = (layout.blocks, layout.heads, layout.tokens // tile, tile, key.dims // wide, wide)
    strides = (
        layout.block_stride, layout.head_stride,
        key.token_outer, key.token_inner, key.dim_outer, key.dim_inner,
    )  # fmt: skip
    start = cache.memory.storage_offset() + layer * layout.layer_stride + key.base
    values = torch.as_strided(cache.memory, shape, strides, start)[numbers]
    return values.reshape(len(numbers), layout.heads, layout.tokens, key.dims).to(torch.float32)


def block_meanings(
    cache: PagedKv, layer: int, numbers: Tensor, places: Tensor, rope: Rope | None
) -> Tensor:
    """The mean key of each block, as it was before the rotation by its position.

    So equal text has nearly equal means wherever it stands.

    Args:
        numbers: int64 [n], blocks.
        places: int64 [n], which block of its sequence each one is.
        rope: How the model rotates keys; None: not at all.

    Returns:
        float32 [n, heads · dims].
    """
    keys = block_keys(cache, layer, numbers)
    if rope is not None:
        count, heads, tokens, dims = keys.shape
        within = torch.arange(tokens, device=places.device)
        positions = (places[:, None] * tokens + within[None, :]).reshape(-1)
        flat = keys.transpose(1, 2).reshape(count * tokens, heads, dims)
        turned = rope.rotate(flat, *rope.rotation(-positions))
        keys = turned.reshape(count, tokens, heads, dims).transpose(1, 2)
    return keys.mean(dim=2).reshape(len(numbers), -1)
