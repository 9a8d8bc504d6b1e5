"""How often a decode step is sampled, and how much of it: by a share of the engine's time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

LONGEST_S: Final = 1.0  # from one sampled step to the next, while the engine decodes; chosen
_EARLY_S: Final = 0.05  # a step may last so long, and the next one be sampled in time; chosen
_SHORTEST_S: Final = 0.1  # from one to the next; chosen
_SAVED_S: Final = 20.0  # seconds whose share may be saved up, or owed; chosen
_OUTLIER: Final = 3.0  # times the estimate: one that costs more was held up by others; chosen
_NEWEST: Final = 0.3  # share of the newest cost in the estimates; chosen
_LAYER_TOKEN_S: Final = 1e-6  # of one layer's mass, per token, before any was measured; a guess
_LEAST_S: Final = 1e-4  # of a step that samples no layer, before any was measured; a guess
_STRICT_LAYER_TOKEN_S: Final = 1e-8  # the same on a GPU; a guess
_STRICT_S: Final = 0.05  # the same of a step without its CUDA graph; a guess, on the safe side
_LEAST_LAYER_TOKEN_S: Final = 1e-10  # so that an estimate can grow again; chosen

Clock = Callable[[], float]


class SamplingBudget:
    """Decides when a step is sampled, and how many layers are.

    A step is sampled at least once per ``LONGEST_S``, with as many layers as there is time for; and
    sooner where there is time for all of them. What a sample costs is measured.

    Args:
        clock: Monotonic seconds.
        used: Seconds that the engine has used: of CPU, or of its GPU.
        share: Of the latter that samples may take.
        strict: A step is sampled only once there is time for what it is expected to cost, however
            long that takes; and whatever it cost more is saved up again.

    Attributes:
        steps, with_layers: Sampled steps; and those of which layers were sampled.
        spent_s: Seconds that they took.
    """

    def __init__(self, clock: Clock, used: Clock, share: float, strict: bool = False) -> None:
        self._clock, self._now_used, self._share = clock, used, share
        self._next = clock()
        self._longest = math.inf if strict else LONGEST_S - _EARLY_S
        self._owed = math.inf if strict else share * _SAVED_S
        self._deadline = self._next + self._longest
        self._used = used()
        self._balance = 0.0
        self._plain = _Estimate(_STRICT_S if strict else _LEAST_S)
        self._layer_token = _Estimate(_STRICT_LAYER_TOKEN_S if strict else _LAYER_TOKEN_S)
        self._whole_s = self._plain.value
        self.steps = self.with_layers = 0
        self.spent_s = 0.0

    @property
    def expected_s(self) -> float:
        """Seconds that a sample is thought to cost, at the last context and with all layers."""
        return self._whole_s

    def is_due(self) -> bool:
        """Whether this decode step is to be sampled; a comparison on most steps.

        A step that is due stays so until ``took`` is told of one.
        """
        now = self._clock()
        if now < self._next:
            return False
        self._next = min(now + _SHORTEST_S, self._deadline)
        used = self._now_used()
        most = max(self._share * _SAVED_S, self._whole_s)
        self._balance = min(most, self._balance + self._share * (used - self._used))
        self._used = used
        if self._balance < self._whole_s and now < self._deadline:
            return False
        self._next = now
        return True

    def layers(self, tokens: int, most: int) -> int:
        """How many layers there is time for, at a context of ``tokens``, at ``most``."""
        spare, each = self._balance - self._plain.value, self._layer_token.value * max(1, tokens)
        self._whole_s = self._plain.value + each * most
        return max(0, min(most, int(spare / each)))

    def took(self, seconds: float, layers: int, tokens: int) -> None:
        """Note what a sampled step cost."""
        self.steps += 1
        self.with_layers += layers > 0
        self.spent_s += seconds
        self._balance = max(self._balance - seconds, -self._owed)
        now = self._clock()
        self._next = now + _SHORTEST_S
        # Counted from when this one was due, and not from when a step began behind that.
        deadline = min(self._deadline, now) + self._longest
        self._deadline = deadline if deadline > now else now + self._longest
        if not layers or seconds < self._plain.value:
            self._plain.follow(seconds)
        if layers:
            each = (seconds - self._plain.value) / (layers * max(1, tokens))
            self._layer_token.follow(max(_LEAST_LAYER_TOKEN_S, each))


class _Estimate:
    """A running estimate of what something costs.

    One measure far above it may have been held up by others; a second one in a row was not.
    """

    def __init__(self, guess: float) -> None:
        self.value = guess
        self._far_above: float | None = None

    def follow(self, measured: float) -> None:
        before, self._far_above = self._far_above, None
        if measured <= _OUTLIER * self.value:
            self.value += _NEWEST * (measured - self.value)
        elif before is not None:
            self.value = min(before, measured)
        else:
            self._far_above = measured
            self.value += _NEWEST * (_OUTLIER - 1.0) * self.value
