"""Settings, errors and budgets of ``ConfKVCache``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Protocol

from ...graph.errors import KvGraphError


class ConfKVError(KvGraphError):
    """Base of every deliberate error of ``ConfKVCache``."""


class SettingsError(ConfKVError, ValueError):
    """A setting's value is not allowed; the message says what is."""


class UnsupportedError(ConfKVError):
    """The cache does not support this model, call or way of running it; the message says which."""


@dataclass(frozen=True, slots=True)
class ConfKVSettings:
    """How much is kept, and what is evicted first. The defaults are chosen.

    Attributes:
        tau: Confidence from which the low budget applies; 0.8 is the cautious setting.
        low: Tokens per layer to keep while the model is confident; 256 suits agents.
        high: Tokens per layer to keep while it is not.
        window: The newest tokens of each layer, which are kept whatever their scores.
        alpha: Weight of attention against recency in a token's score, 0 to 1; the paper mixes both.
            ``docs/transformers_results.md`` shows what recency costs in addition to a window.
        gamma: Share of its past that the moving average of attention keeps at each step, below 1.
        slack: Steps between two evictions; the high budget may be exceeded by as many tokens.
        int8: Whether tokens older than the window are stored in int8.
        pyramid: How much the first layer's budget exceeds the mean, and the last one's falls short
            of it: 0 is flat, 0.5 gives the first layer half more. The sum stays the same.
    """

    tau: float = 0.7
    low: int = 128
    high: int = 512
    window: int = 64
    alpha: float = 1.0
    gamma: float = 0.97
    slack: int = 16
    int8: bool = False
    pyramid: float = 0.0

    def __post_init__(self) -> None:
        _within("tau", self.tau, 0.0, 1.0)
        _within("alpha", self.alpha, 0.0, 1.0)
        _within("gamma", self.gamma, 0.0, 0.999)
        _within("pyramid", self.pyramid, 0.0, 0.9)
        _at_least("window", self.window, 1)
        _at_least("slack", self.slack, 1)
        _at_least("low", self.low, self.window + self.slack, " (window + slack)")
        _at_least("high", self.high, self.low, " (low)")
        if not isinstance(self.int8, bool):
            raise SettingsError(f"int8 = {self.int8!r}; allowed: True or False")


def _within(name: str, value: float, least: float, most: float) -> None:
    if not isinstance(value, Real) or isinstance(value, bool) or not least <= value <= most:
        raise SettingsError(f"{name} = {value!r}; allowed: {least} to {most}")


def _at_least(name: str, value: int, least: int, why: str = "") -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise SettingsError(f"{name} = {value!r}; allowed: whole numbers, {least} and more{why}")


class Budgets(Protocol):
    """Decides at each step how many tokens a layer of average depth may keep."""

    def choose(self, confidence: Sequence[float]) -> list[int]:
        """Return how many tokens each row of the batch may keep, given its confidence in [0, 1]."""


class ByConfidence:
    """Gives the low budget while the model is confident, and the high one while it is not."""

    def __init__(self, settings: ConfKVSettings) -> None:
        self._settings = settings

    def choose(self, confidence: Sequence[float]) -> list[int]:
        it = self._settings
        return [it.low if score >= it.tau else it.high for score in confidence]


def layer_shares(layers: int, pyramid: float) -> list[float]:
    """Return each layer's budget in units of the mean budget, the first layer's first. It falls
    linearly from ``1 + pyramid`` to ``1 - pyramid``; a single layer gets 1.
    """
    if layers == 1:
        return [1.0]
    return [1.0 + pyramid * (1.0 - 2.0 * depth / (layers - 1)) for depth in range(layers)]
