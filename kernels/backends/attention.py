"""A decode step's attention per block, and the model's confidence in its next token."""

from __future__ import annotations

import math
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from ..layout import PagedKv
from ..tensors import Tensor
from .base import Confidence, block_keys


def confidence(logits: Tensor) -> Confidence:
    """Return entropy, margin and top mass by row, float32 [rows]; −∞ has no mass."""
    log_p = torch.log_softmax(logits.to(torch.float32), dim=-1)
    plogp = torch.where(log_p.isneginf(), torch.zeros_like(log_p), log_p.exp() * log_p)
    first, second = log_p.topk(2, dim=-1).values.unbind(-1)
    return Confidence(-plogp.sum(-1) / math.log(logits.shape[-1]), first - second, first.exp())


def attention_mass(
    cache: PagedKv, layer: int, queries: Tensor, block_table: Tensor, lengths: Tensor, scale: float
) -> Tensor:
    """Return the share of one layer's attention for each block of a sequence, averaged over heads.

    Args:
        queries: float [S, query heads, dims], rotated, one decode query per sequence.
        block_table: int64 [S, max blocks]; entries after a sequence's end are not read.
        lengths: int64 [S], tokens that the query may attend to, at least one.
        scale: Factor of the logits, usually dims ** -0.5.

    Returns:
        float32 [S, max blocks]; a row sums to 1, blocks after the end have 0.
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


# Weights of 1 − normalised entropy, of 1 − exp(−margin) and of the first choice's probability.
# Chosen; the weights that the method was published with are not known.
WEIGHTS: Final = (0.25, 0.25, 0.5)


def confidence_score(logits: Tensor) -> Tensor:
    """Return the model's confidence in each row, float32 [rows]: 0 for uniform logits, 1 for one
    token.

    It falls with entropy, and rises with the margin between the first two choices and with the
    probability of the first. It is not a probability of being right, since nothing calibrates it.
    −∞ excludes a token; a row without any possible token or with a NaN scores 0.
    """
    return score_of(confidence(logits))


def score_of(found: Confidence) -> Tensor:
    """Return ``confidence_score`` of a ``Confidence``, float32 [rows], on its device."""
    by_entropy, by_margin, by_mass = WEIGHTS
    score = by_entropy * (1.0 - found.entropy) + by_margin * -torch.expm1(-found.margin)
    return torch.nan_to_num(score + by_mass * found.top_mass, nan=0.0).clamp(0.0, 1.0)


# torch splits work among its threads from 2^15 values on, which is less than a row of logits has.
# Waking them costs an engine many times what the work does, so host logits are read by one thread.

_ALONE: Final = 1 << 15  # values that torch works on without waking a thread: its GRAIN_SIZE
_NOTHING: Final = -200.0  # e to this is 0 as a float32

Floats: TypeAlias = npt.NDArray[np.float32]


def host_confidence(logits: Tensor) -> Confidence:
    """Return the confidence of logits [rows, vocabulary] of at least two tokens, using one
    thread.
    """
    below = np.empty(tuple(logits.shape), dtype=np.float32)
    for row, copy in zip(logits, torch.from_numpy(below), strict=True):
        for some, place in zip(row.split(_ALONE), copy.split(_ALONE), strict=True):
            place.copy_(some)
    with np.errstate(invalid="ignore", divide="ignore"):
        found = _confidence(below)
    return Confidence(*map(torch.from_numpy, found))


def _confidence(below: Floats) -> tuple[Floats, Floats, Floats]:
    rows = np.arange(len(below))
    best = below.argmax(-1)
    below -= below[rows, best][:, None]
    below[rows, best] = -np.inf
    margin = -below.max(-1)
    below[rows, best] = 0.0
    np.maximum(below, _NOTHING, out=below)
    shares = np.exp(below)
    total = shares.sum(-1)
    shares *= below
    entropy = (np.log(total) - shares.sum(-1) / total) / np.log(np.float32(below.shape[-1]))
    return entropy, margin, 1.0 / total
