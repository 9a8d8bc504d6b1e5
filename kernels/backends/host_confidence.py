"""Confidence from logits in host memory, on the calling thread alone.

torch shares such work among its threads from 2^15 values on, which is less than a row of logits
has. To wake them costs an engine many times what the work does.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from ..tensors import Tensor
from .base import Confidence

_ALONE: Final = 1 << 15  # values that torch works on without waking a thread: its GRAIN_SIZE
_NOTHING: Final = -200.0  # e to this is 0 as a float32

Floats: TypeAlias = npt.NDArray[np.float32]


def host_confidence(logits: Tensor) -> Confidence:
    """``attention.confidence``, for logits [rows, vocabulary] of at least two tokens."""
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
