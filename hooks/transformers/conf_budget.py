"""How many tokens may stay: by confidence, or by what an earlier run decided."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from .conf_settings import ConfKVSettings


class Budgets(Protocol):
    """Decides at each step how many tokens of a layer of mean depth may stay."""

    def choose(self, confidence: Sequence[float]) -> list[int]:
        """Tokens that may stay, for each row of the batch."""


class ByConfidence:
    """The low budget while the model is sure, the high one while it is not."""

    def __init__(self, settings: ConfKVSettings) -> None:
        self._settings = settings

    def choose(self, confidence: Sequence[float]) -> list[int]:
        """``low`` from a confidence of ``tau``, else ``high``."""
        it = self._settings
        return [it.low if score >= it.tau else it.high for score in confidence]


class Replayed:
    """Budgets of an earlier run, step by step; the last one holds when they are used up."""

    def __init__(self, schedule: Sequence[Sequence[int]]) -> None:
        self._steps: Iterator[list[int]] = iter([list(step) for step in schedule])
        self._last = list(schedule[0])

    def choose(self, confidence: Sequence[float]) -> list[int]:
        """What was decided at this step of the earlier run."""
        self._last = next(self._steps, self._last)
        return self._last


def layer_shares(layers: int, pyramid: float) -> list[float]:
    """Each layer's budget as a share of the mean: falls in a line with depth, and the mean is 1."""
    if layers == 1:
        return [1.0]
    return [1.0 + pyramid * (1.0 - 2.0 * depth / (layers - 1)) for depth in range(layers)]
