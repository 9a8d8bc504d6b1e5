"""Measures of one sampled step: how sure the model was, where a request looked, and what the blocks
there say. On a GPU all of it is queued, and nothing waits for it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from ....kernels import ops
from ....kernels.backends.base import Confidence
from ....kernels.backends.block_keys import block_meanings
from ....kernels.backends.confidence_score import score_of
from ....kernels.backends.host_confidence import host_confidence

if TYPE_CHECKING:
    from ....kernels.layout.layout import PagedKv
    from ....kernels.maths.rope import Rope
    from ....kernels.tensors import Tensor

_AT_ONCE: Final = 4  # blocks embedded per sampled step; chosen
_CENTRE_OF: Final = 32  # blocks whose mean is taken for what all keys share; chosen
_WIDEST: Final = 4096  # values of an embedding that the wire takes
_REQUESTS: Final = 1024  # whose embedded blocks are remembered; chosen


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


def sureness(cache: PagedKv, logits: Tensor, spans: Sequence[slice]) -> Tensor:
    """How sure the model is of each of some rows' next token: float32 [rows], beside the logits.

    Args:
        cache: Says where the measuring is done.
        logits: [all rows, vocabulary].
        spans: Which rows, in the order of the result.
    """
    if cache.memory.is_cuda:
        rows = torch.cat([logits[span] for span in spans]).to(torch.float32)
        return score_of(ops.observer(cache).confidence(rows))
    found = [host_confidence(logits[span]) for span in spans]
    return score_of(Confidence(*map(torch.cat, zip(*found, strict=True))))


def attended(cache: PagedKv, looks: Sequence[Look], blocks: Tensor, tokens: int) -> Tensor:
    """Each block's share of the attention, averaged over layers.

    Args:
        blocks: int64 [n], the request's, in their order, where the cache is.
        tokens: That the query sees.

    Returns:
        float32 [n], where the cache is.
    """
    backend, table = ops.observer(cache), blocks[None]
    lengths = ops.brought(cache, torch.tensor([tokens]))
    masses = [
        backend.attention_mass(cache, look.layer, look.query[None], table, lengths, look.scale)[0]
        for look in looks
    ]
    return torch.stack(masses).mean(0)


class Meanings:
    """Embeds blocks: by their mean key in the middle layer, less what all blocks' keys share.

    The mean of the first blocks is taken for the latter; nothing is told before. Without that, all
    blocks of a model would be near to each other.

    Args:
        cache: The engine's.
        rope: How the model rotates keys; None: not at all.
    """

    def __init__(self, cache: PagedKv, rope: Rope | None) -> None:
        self._cache = cache
        # Where the cache is: to bring the angles there each time would wait for the GPU.
        self._rope = rope and replace(rope, inv_freq=ops.brought(cache, rope.inv_freq))
        self._layer = cache.layout.layers // 2
        self._sum: Tensor | None = None
        self._seen = 0
        self._told: OrderedDict[str, set[int]] = OrderedDict()  # request → places of its blocks

    def choose(self, request_id: str, blocks: Tensor, mass: Tensor) -> tuple[Tensor, Tensor] | None:
        """Embed the most attended full blocks that were not told yet of this request.

        Args:
            blocks: int64 [n], full blocks of the request.
            mass: float32 [n], where the cache is, as the blocks are.

        Returns:
            Places in ``blocks``, int64 [k], and their mean keys, float32 [k, dim], where the cache
            is; None if there is no block to embed.
        """
        told = [place for place in self._told.get(request_id, ()) if place < len(blocks)]
        count = min(_AT_ONCE, len(blocks) - len(told))
        if count <= 0:
            return None
        if told:
            behind = torch.zeros(len(blocks))
            behind[told] = -2.0  # a share is within [0, 1]
            mass = mass + ops.brought(self._cache, behind)
        places = torch.topk(mass, count).indices
        keys = block_meanings(self._cache, self._layer, blocks[places], places, self._rope)
        if keys.shape[1] > _WIDEST:
            keys = keys.reshape(count, self._cache.layout.heads, -1).mean(1)
        return places, keys

    def tell(
        self, request_id: str, places: Tensor, keys: Tensor
    ) -> tuple[tuple[int, ...], Tensor | None]:
        """What may be told of blocks that ``choose`` chose, now in host memory.

        Returns:
            Places, and float16 [places, dim]; no places and None while the mean is not known.
        """
        if self._sum is None:
            self._sum = torch.zeros_like(keys[0])
        if self._seen < _CENTRE_OF:
            self._sum += keys.sum(0)
            self._seen += len(places)
            return (), None
        told = self._told.setdefault(request_id, set())
        told.update(places.tolist())
        self._told.move_to_end(request_id)
        if len(self._told) > _REQUESTS:
            self._told.popitem(last=False)
        return tuple(places.tolist()), (keys - self._sum / self._seen).to(torch.float16)
