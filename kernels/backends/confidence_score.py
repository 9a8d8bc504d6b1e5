"""One number for how sure a model is of its next token, from the logits before sampling."""

from __future__ import annotations

from typing import Final

import torch

from ..tensors import Tensor
from .attention import confidence
from .base import Confidence

# Of 1 − normalised entropy, of 1 − exp(−margin) and of the first choice's probability. Chosen; the
# weights that the method was published with are not known.
WEIGHTS: Final = (0.25, 0.25, 0.5)


def confidence_score(logits: Tensor, weights: tuple[float, float, float] = WEIGHTS) -> Tensor:
    """How sure the model is of each row: 0 for uniform logits, 1 for a single possible token.

    Falls with entropy and rises with the margin between the first two and with the first choice's
    probability. It is no probability of being right: nothing calibrates it.

    Args:
        logits: [rows, vocabulary]; −∞ rules a token out. A row without any possible token or with
            a NaN scores 0.

    Returns:
        float32 [rows], in [0, 1].
    """
    return score_of(confidence(logits), weights)


def score_of(found: Confidence, weights: tuple[float, float, float] = WEIGHTS) -> Tensor:
    """``confidence_score`` of what was found of rows of logits; float32 [rows], where that is."""
    by_entropy, by_margin, by_mass = weights
    score = by_entropy * (1.0 - found.entropy) + by_margin * -torch.expm1(-found.margin)
    return torch.nan_to_num(score + by_mass * found.top_mass, nan=0.0).clamp(0.0, 1.0)
