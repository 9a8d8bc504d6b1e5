"""The contract of back ends: modules with functions of these signatures, which produce the same
bits as ``reference``, where each is documented. Block numbers, slots and Δ are int64 in host
memory, unless a back end says otherwise; ``ops`` has checked them.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from ..layout import Blocks, PagedKv, SlotMap
from ..rope import Rope
from ..tensors import Tensor
from .reference import read_plane


class Backend(Protocol):
    """Moves the bytes of paged memories."""

    def prepare(self, cache: PagedKv, arena: PagedKv) -> None:
        """Compile and measure what the first moves would wait for; raises BuildError."""

    def copy_blocks(self, source: Blocks, target: Blocks) -> None:
        """Copy blocks [n], byte for byte, from a cache to an arena or back.

        Raises:
            LayoutError: The two differ inside a block, or this back end cannot address them.
        """

    def splice(self, source: PagedKv, target: PagedKv, slots: SlotMap, rope: Rope) -> None:
        """Copy tokens [T] to other slots [T]: K rotated by Δ [T], V unchanged.

        Raises:
            LayoutError: The layouts hold different models, or this back end cannot address them.
        """


class Confidence(NamedTuple):
    """Confidence in the next token, from logits [rows, vocabulary]; each float32 [rows]."""

    entropy: Tensor  # divided by log(vocabulary): 0 is certain, 1 is uniform
    margin: Tensor  # log-probability of the first choice minus that of the second
    top_mass: Tensor  # probability of the first choice


class Observer(Protocol):
    """Reads a decode step's attention and confidence; ``attention`` is the reference."""

    def attention_mass(
        self, cache: PagedKv, layer: int, queries: Tensor, block_table: Tensor, lengths: Tensor,
        scale: float,
    ) -> Tensor:  # fmt: skip
        """Return the share of one layer's attention for each block; see ``attention``."""

    def confidence(self, logits: Tensor) -> Confidence:
        """Return entropy, margin and top mass of each row of logits [rows, vocabulary]."""


def block_keys(cache: PagedKv, layer: int, numbers: Tensor) -> Tensor:
    """Return a layer's keys of blocks int64 [n] as float32 [n, heads, tokens, dims]."""
    # Blocks are taken by strides, all their tokens at once: an address per value would take a long
    # context several times as long.
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
    """Return the mean key of each block before rotation, float32 [n, heads · dims].

    So equal text has nearly equal means at any position.

    Args:
        numbers: int64 [n], blocks.
        places: int64 [n], index of each block in its sequence.
        rope: How the model rotates keys; None if it does not.
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
