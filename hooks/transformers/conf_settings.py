"""What a person may set of the cache; read once, when it is made."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real

from .errors import SettingsError


@dataclass(frozen=True, slots=True)
class ConfKVSettings:
    """How much is kept, and who goes first. The defaults are chosen.

    Attributes:
        tau: Confidence from which the low budget holds; .8 is the cautious setting.
        low: Tokens per layer that stay while the model is sure; 256 suits agents.
        high: Tokens per layer that stay while it is not.
        window: The newest tokens of each layer, which stay whatever their score.
        alpha: Weight of attention against recency in the score of a token, 0 to 1; the paper mixes
            them. See ``docs/transformers_results.md`` for what recency costs beside a window.
        gamma: What the moving average of attention keeps of its past at each step, below 1.
        slack: Steps from one eviction to the next; the high budget may be exceeded by as many
            tokens.
        int8: Whether tokens older than the window are stored in int8.
        pyramid: How much the budget of the first layers exceeds the mean, and that of the last
            falls short of it: 0 is flat, .5 gives the first half more. The sum stays.
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
