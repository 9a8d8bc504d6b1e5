"""Measures of one sampled step: where a request looked, and what the blocks there say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from ....kernels import ops
from ....kernels.backends.block_keys import block_meanings

if TYPE_CHECKING:
    from ....kernels.layout.layout import PagedKv
    from ....kernels.maths.rope import Rope
    from ....kernels.tensors import Tensor

_AT_ONCE: Final = 4  # blocks embedded per sampled step; chosen
_CENTRE_OF: Final = 32  # blocks whose mean is taken for what all keys share; chosen
_WIDEST: Final = 4096  # values of an embedding that the wire takes


class Look(NamedTuple):
    """A layer's decode query, as its attention got it.

    Attributes:
        layer: Place of the layer in the cache.
        query: [query heads, dims], rotated.
        scale: What its logits are multiplied with.
    """

    layer: int
    query: Tensor
    scale: float


def attended(cache: PagedKv, looks: Sequence[Look], blocks: Tensor, tokens: int) -> Tensor:
    """Each block's share of the attention, averaged over layers.

    Args:
        blocks: int64 [n], the request's, in their order.
        tokens: That the query sees.

    Returns:
        float32 [n].
    """
    lengths = torch.tensor([tokens], device=blocks.device)
    backend = ops.observer(cache)
    total = torch.zeros(len(blocks), device=blocks.device)
    for look in looks:
        query, table = look.query[None], blocks[None]
        total += backend.attention_mass(cache, look.layer, query, table, lengths, look.scale)[0]
    return total / len(looks)


class Meanings:
    """Embeds blocks: by their mean key in the middle layer, less what all blocks' keys share.

    The mean of the first blocks is taken for the latter; nothing is told before. Without that, all
    blocks of a model would be near to each other.

    Args:
        cache: The engine's.
        rope: How the model rotates keys; None: not at all.
    """

    def __init__(self, cache: PagedKv, rope: Rope | None) -> None:
        self._cache, self._rope = cache, rope
        self._layer = cache.layout.layers // 2
        self._sum: Tensor | None = None
        self._seen = 0
        self._told: dict[int, str] = {}  # block → the request that it was embedded for last

    def of(
        self, request_id: str, blocks: Tensor, mass: Tensor
    ) -> tuple[tuple[int, ...], Tensor | None]:
        """Embed the most attended full blocks that were not embedded yet for this request.

        Args:
            blocks: int64 [n], full blocks of the request.
            mass: float32 [n].

        Returns:
            Places in ``blocks``, and float16 [places, dim]; no places and None while the mean is
            not known.
        """
        places = self._fresh(request_id, blocks, mass)
        if not places:
            return (), None
        chosen = torch.tensor(places, device=blocks.device)
        meanings = block_meanings(self._cache, self._layer, blocks[chosen], chosen, self._rope)
        if meanings.shape[1] > _WIDEST:
            meanings = meanings.reshape(len(places), self._cache.layout.heads, -1).mean(1)
        if self._sum is None:
            self._sum = torch.zeros_like(meanings[0])
        if self._seen < _CENTRE_OF:
            self._sum += meanings.sum(0)
            self._seen += len(places)
            return (), None
        for block in blocks[chosen].tolist():
            self._told[block] = request_id
        return tuple(places), (meanings - self._sum / self._seen).to(torch.float16)

    def _fresh(self, request_id: str, blocks: Tensor, mass: Tensor) -> list[int]:
        found: list[int] = []
        numbers = blocks.tolist()
        for place in torch.argsort(mass, descending=True).tolist():
            if self._told.get(numbers[place]) != request_id:
                found.append(place)
                if len(found) == _AT_ONCE:
                    break
        return found
