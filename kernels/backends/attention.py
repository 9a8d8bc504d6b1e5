"""What a decode step looked at, and how sure the model was: block masses and confidence."""

from __future__ import annotations

import math

import torch

from ..layout.layout import PagedKv
from ..tensors import Tensor
from .base import Confidence
from .block_keys import block_keys


def confidence(logits: Tensor) -> Confidence:
    """Entropy, margin and top mass of each row; float32 [rows]. Logits of −∞ have no mass."""
    log_p = torch.log_softmax(logits.to(torch.float32), dim=-1)
    plogp = torch.where(log_p.isneginf(), torch.zeros_like(log_p), log_p.exp() * log_p)
    first, second = log_p.topk(2, dim=-1).values.unbind(-1)
    return Confidence(-plogp.sum(-1) / math.log(logits.shape[-1]), first - second, first.exp())


def attention_mass(
    cache: PagedKv, layer: int, queries: Tensor, block_table: Tensor, lengths: Tensor, scale: float
) -> Tensor:
    """Share of one layer's attention that each block of a sequence gets, averaged over heads.

    Args:
        queries: float [S, query heads, dims], rotated, one decode query a sequence.
        block_table: int64 [S, max blocks]; entries behind a sequence's end are not read.
        lengths: int64 [S], tokens that the query may see, at least one.
        scale: What logits are multiplied with, usually dims ** -0.5.

    Returns:
        float32 [S, max blocks]; a row sums to 1, blocks behind the end have 0.
    """
    layout, (samples, width) = cache.layout, block_table.shape
    offsets = torch.arange(width * layout.tokens, device=queries.device)
    seen = offsets[None, :] < lengths[:, None]
    begun = seen[:, :: layout.tokens]
    keys = block_keys(cache, layer, torch.where(begun, block_table, 0).reshape(-1))
    keys = keys.reshape(samples, width, layout.heads, layout.tokens, layout.key.dims)
    grouped = queries.to(torch.float32).reshape(samples, layout.heads, -1, layout.key.dims)
    logits = torch.einsum("shgd,swhtd->shgwt", grouped, keys).flatten(-2) * scale
    logits = logits.masked_fill(~seen[:, None, None, :], -torch.inf)
    mass = torch.softmax(logits, dim=-1).mean(dim=(1, 2))
    return mass.reshape(samples, width, layout.tokens).sum(-1)
