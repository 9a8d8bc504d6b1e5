"""One number for how sure a model is of its next token, from the logits before sampling."""

from __future__ import annotations

from typing import Final

import torch

from ..tensors import Tensor
from .attention import confidence

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
    entropy, margin, top_mass = confidence(logits)
    by_entropy, by_margin, by_mass = weights
    score = by_entropy * (1.0 - entropy) + by_margin * -torch.expm1(-margin) + by_mass * top_mass
    return torch.nan_to_num(score, nan=0.0).clamp(0.0, 1.0)
