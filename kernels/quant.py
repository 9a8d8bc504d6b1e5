"""int8 quantisation: per token and head, as ``int8_per_token_head``, or per head and channel."""

from __future__ import annotations

import torch

from .tensors import Tensor

MIN_SCALE = 1e-6  # vLLM's value, so that a row of zeros has a scale to divide by


def quantize(values: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise rows symmetrically: float32 […, dims] → int8 […, dims] and float32 scales […].

    ``scale = max(max|x| / 127, 1e-6)``, ``q = round_half_away(x · (1 / scale))`` in [−128, 127].
    The error is at most half a step: 0.4 % of the row's largest magnitude.
    """
    scale = (values.abs().amax(-1) / 127.0).clamp_min(MIN_SCALE)
    steps = values * (1.0 / scale)[..., None]
    # vLLM adds half a step towards the sign, and truncates.
    steps = torch.where(steps >= 0, steps + 0.5, steps - 0.5).clamp(-128.0, 127.0)
    return steps.to(torch.int8), scale


def dequantize(cells: Tensor, scale: Tensor) -> Tensor:
    """Return rows in float32 from int8 […, dims] and float32 scales […]."""
    return cells.to(torch.float32) * scale[..., None]


# Below: int8 with one scale per head and channel, which all tokens of a store share.

STEPS = 127.0


def channel_scale(values: Tensor) -> Tensor:
    """Return the scale of all tokens; [batch, heads, tokens, dims] → [batch, heads, dims]."""
    return (values.to(torch.float32).abs().amax(2) / STEPS).clamp_min(MIN_SCALE)


def to_cells(values: Tensor, scale: Tensor) -> Tensor:
    """Quantise [batch, heads, tokens, dims] to int8; the error is at most half a step."""
    steps = values.to(torch.float32) / scale[:, :, None, :]
    return steps.round_().clamp_(-STEPS, STEPS).to(torch.int8)


def from_cells(cells: Tensor, scale: Tensor) -> Tensor:
    return cells.to(torch.float32) * scale[:, :, None, :]


def rescaled(cells: Tensor, old: Tensor, new: Tensor) -> Tensor:
    """Requantise to the wider scale ``new``; unchanged scales leave cells' bits."""
    return to_cells(from_cells(cells, old), new)
