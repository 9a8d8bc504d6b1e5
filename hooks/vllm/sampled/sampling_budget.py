"""How often a decode step is sampled, and how much of it: by a share of the engine's CPU time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

LONGEST_S: Final = 1.0  # from one sampled step to the next, while the engine decodes; chosen
_SHORTEST_S: Final = 0.1  # from one to the next; chosen
_SAVED_S: Final = 20.0  # seconds of CPU whose share may be saved up, or owed; chosen
_OUTLIER: Final = 3.0  # times the estimate: what costs more was held up by others; chosen
_NEWEST: Final = 0.3  # share of the newest cost in the estimates; chosen
_LAYER_TOKEN_S: Final = 1e-6  # of one layer's mass, per token, before any was measured; a guess
_LEAST_S: Final = 1e-4  # of a step that samples no layer, before any was measured; a guess

Clock = Callable[[], float]


class SamplingBudget:
    """Decides when a step is sampled, and how many layers are.

    A step is sampled at least once per ``LONGEST_S``, with as many layers as there is time for; and
    sooner where there is time for all of them. What a sample costs is measured.

    Args:
        clock: Monotonic seconds.
        cpu: CPU seconds that this process has used.
        share: Of the latter that samples may take.

    Attributes:
        steps, with_layers: Sampled steps; and those of which layers were sampled.
        spent_s: CPU seconds that they took.
    """

    def __init__(self, clock: Clock, cpu: Clock, share: float) -> None:
        self._clock, self._cpu, self._share = clock, cpu, share
        self._next = self._last = clock()
        self._used = cpu()
        self._balance = 0.0
        self._plain_s = self._whole_s = _LEAST_S  # without layers; with all of them
        self._layer_token_s = _LAYER_TOKEN_S
        self.steps = self.with_layers = 0
        self.spent_s = 0.0

    def is_due(self) -> bool:
        """Whether the next decode step is to be sampled; a comparison on most steps."""
        now = self._clock()
        if now < self._next:
            return False
        self._next = now + _SHORTEST_S
        used = self._cpu()
        most = self._share * _SAVED_S
        self._balance = min(most, self._balance + self._share * (used - self._used))
        self._used = used
        return self._balance >= self._whole_s or now - self._last >= LONGEST_S - _SHORTEST_S

    def layers(self, tokens: int, most: int) -> int:
        """How many layers there is time for, at a context of ``tokens``, at ``most``."""
        spare = self._balance - self._plain_s
        self._whole_s = self._plain_s + self._layer_token_s * tokens * most
        return max(0, min(most, int(spare / (self._layer_token_s * max(1, tokens)))))

    def took(self, seconds: float, layers: int, tokens: int) -> None:
        """Note what a sampled step cost."""
        self.steps += 1
        self.with_layers += layers > 0
        self.spent_s += seconds
        self._balance = max(self._balance - seconds, -self._share * _SAVED_S)
        now = self._last = self._clock()
        self._next = now + _SHORTEST_S
        if not layers:
            self._plain_s = _follow(self._plain_s, seconds)
            return
        each = max(0.0, seconds - self._plain_s) / (layers * max(1, tokens))
        self._layer_token_s = _follow(self._layer_token_s, each)


def _follow(estimate: float, measured: float) -> float:
    return estimate + _NEWEST * (min(measured, _OUTLIER * estimate) - estimate)
