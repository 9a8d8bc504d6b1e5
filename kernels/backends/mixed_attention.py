"""Attention over tokens that are stored in parts, some of them in int8, tile by tile.

An int8 part has one scale per head and channel, shared by its tokens, so that nothing need be
turned back into floats but the tile at hand: K's scales multiply the queries, V's the sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from ..tensors import Tensor

TILE = 256  # tokens looked at together; chosen: a tile of 8 heads of 64 dimensions stays in L2


class Part(NamedTuple):
    """Consecutive tokens of a layer, stored alike.

    Attributes:
        keys: [batch, kv heads, tokens, dims], floating point or int8.
        values: [batch, kv heads, tokens, value dims], likewise.
        key_scale: float32 [batch, kv heads, dims] of int8 keys, else None.
        value_scale: float32 [batch, kv heads, value dims], likewise.
    """

    keys: Tensor
    values: Tensor
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None


class Attended(NamedTuple):
    """What queries read, and what they looked at.

    Attributes:
        output: [batch, query heads, queries, value dims], in the queries' type.
        mass: float32 [batch, queries, tokens], each token's share of a query's attention, averaged
            over heads; a row sums to 1.
    """

    output: Tensor
    mass: Tensor


def mixed_attention(
    queries: Tensor, parts: Sequence[Part], visible: Tensor | None, scale: float, tile: int = TILE
) -> Attended:
    """Softmax attention over the tokens of all parts, in their order, by the online method.

    Args:
        queries: [batch, query heads, queries, dims]; query heads are a multiple of kv heads.
        parts: At least one token in all.
        visible: bool [batch, queries, tokens], or None if every query sees everything. A query
            that sees nothing reads zeros and has no mass.
        scale: What logits are multiplied with, usually dims ** -0.5.
        tile: Tokens that are looked at together.
    """
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
    return Attended(output.to(queries.dtype), mass)


def observed_mass(queries: Tensor, keys: Tensor, visible: Tensor | None, scale: float) -> Tensor:
    """The mass alone, of keys [batch, kv heads, tokens, dims] in one part; see ``Attended``."""
    batch, heads, count, dims = queries.shape
    grouped = queries.to(torch.float32).reshape(batch, keys.shape[1], -1, dims) * scale
    seen = (grouped @ keys.to(torch.float32).mT).reshape(batch, heads, count, -1)
    if visible is None:
        return seen.softmax(-1).mean(1)
    seen = seen.masked_fill(~visible[:, None], -torch.inf)
    return seen.softmax(-1).nan_to_num(nan=0.0).mean(1)


def _tiles(
    parts: Sequence[Part], grouped: Tensor, tile: int
) -> Iterator[tuple[Part, Tensor, int, int]]:
    """``(part, queries in its scale, from, to)`` of each tile."""
    for part in parts:
        scaled = grouped if part.key_scale is None else grouped * part.key_scale[:, :, None, :]
        for low in range(0, part.keys.shape[2], tile):
            yield part, scaled, low, min(low + tile, part.keys.shape[2])


class _Running:
    """The maximum, the sum and the weighted values of the tiles so far."""

    def __init__(self, grouped: Tensor, dims: int) -> None:
        self._most = grouped.new_full((*grouped.shape[:3], 1), -torch.inf)
        self._sum = torch.zeros_like(self._most)
        self._read = grouped.new_zeros((*grouped.shape[:3], dims))

    def add(self, seen: Tensor, part: Part, low: int, high: int) -> None:
        """Take one tile's logits [batch, kv heads, rows, tile] and its values into account."""
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
        """Each token's share, from the logits of all tiles."""
        finite = self._most.masked_fill(self._most.isneginf(), 0.0)
        return (logits - finite).exp() / self._divisor()

    def result(self) -> Tensor:
        """The values read, [batch, kv heads, rows, value dims]."""
        return self._read / self._divisor()

    def _divisor(self) -> Tensor:
        return self._sum.masked_fill(self._sum == 0.0, 1.0)
