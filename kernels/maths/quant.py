"""int8 with one scale per token and head, the arithmetic of vLLM's ``int8_per_token_head``."""

from __future__ import annotations

import torch

from ..tensors import Tensor

MIN_SCALE = 1e-6  # vLLM's: a row of zeros still has a scale to divide by


def quantize(values: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise rows symmetrically.

    ``scale = max(max|x| / 127, 1e-6)``, ``q = round_half_away(x · (1 / scale))`` in [−128, 127].
    The error is at most half a step: 0.4 % of the row's largest magnitude.

    Args:
        values: float32 […, dims].

    Returns:
        int8 […, dims] and float32 scales […].
    """
    scale = (values.abs().amax(-1) / 127.0).clamp_min(MIN_SCALE)
    steps = values * (1.0 / scale)[..., None]
    # vLLM adds half a step towards the sign, and truncates.
    steps = torch.where(steps >= 0, steps + 0.5, steps - 0.5).clamp(-128.0, 127.0)
    return steps.to(torch.int8), scale


def dequantize(cells: Tensor, scale: Tensor) -> Tensor:
    """Rows back in float32; int8 […, dims] and float32 scales […]."""
    return cells.to(torch.float32) * scale[..., None]
