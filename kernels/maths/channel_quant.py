"""int8 with one scale per head and channel, which all tokens of a store share."""

from __future__ import annotations

import torch

from ..tensors import Tensor

MIN_SCALE = 1e-6  # a channel of zeros still has a scale to divide by
STEPS = 127.0


def channel_scale(values: Tensor) -> Tensor:
    """The least symmetric scale that holds all tokens; [batch, heads, tokens, dims] → no tokens."""
    return (values.to(torch.float32).abs().amax(2) / STEPS).clamp_min(MIN_SCALE)


def to_cells(values: Tensor, scale: Tensor) -> Tensor:
    """Values [batch, heads, tokens, dims] as int8; off by half a step of ``scale`` at most."""
    steps = values.to(torch.float32) / scale[:, :, None, :]
    return steps.round_().clamp_(-STEPS, STEPS).to(torch.int8)


def from_cells(cells: Tensor, scale: Tensor) -> Tensor:
    """Cells back as float32."""
    return cells.to(torch.float32) * scale[:, :, None, :]


def rescaled(cells: Tensor, old: Tensor, new: Tensor) -> Tensor:
    """Cells in a wider scale; those whose scale did not change keep their bits."""
    return to_cells(from_cells(cells, old), new)
