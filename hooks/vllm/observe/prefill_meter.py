"""``PrefillMeter``: how fast an engine computes prompts, told from when its steps are scheduled."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from ....graph.messages.events import AnyEvent, Pressure

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_SHARE: Final = 0.2  # weight of the newest sample in the mean; chosen, as in ``TransferCosts``
_LEAST_TOKENS: Final = 64  # steps with fewer say little about prefill; chosen
_LONGEST_S: Final = 10.0  # what lies longer apart is no step but a pause; chosen


class PrefillMeter:
    """Running mean of the tokens per second of steps that do not only decode.

    Nobody tells a connector without workers when a step is over. But while a request goes on, the
    next step is scheduled as soon as a step is over: what lies between two is what one took.

    Args:
        behind: Steps that are under way while another is scheduled: 1 with asynchronous
            scheduling, else 0.

    Attributes:
        tokens_per_s: 0 before the first sample.
    """

    def __init__(self, behind: int) -> None:
        self.tokens_per_s = 0.0
        self._nothing = [0] * (behind + 1)
        self._tokens = deque(self._nothing, maxlen=behind + 1)
        self._at = 0.0
        self._witness: str | None = None

    @classmethod
    def of(cls, config: VllmConfig) -> PrefillMeter:
        """The meter of an engine that is configured so."""
        return cls(1 if getattr(config.scheduler_config, "async_scheduling", False) else 0)

    def told_with(self, pressure: Callable[[], Pressure]) -> Callable[[], AnyEvent]:
        """The same reports, with the rate."""
        return lambda: replace(pressure(), prefill_tokens_per_s=round(self.tokens_per_s, 1))

    def stepped(self, tokens: int, running: dict[str, Any], now: float) -> None:
        """Note that a step was scheduled.

        Args:
            tokens: Of the step.
            running: Requests that go on or began in it, by their ids, the newest last.
            now: Seconds.
        """
        took, computed = now - self._at, self._tokens[0]
        if self._witness not in running:  # all may have ended since: it may have been idle
            self._tokens.extend(self._nothing)
        elif computed >= _LEAST_TOKENS and 0 < took < _LONGEST_S:
            mean, sample = self.tokens_per_s, computed / took
            self.tokens_per_s = mean + _SHARE * (sample - mean) if mean else sample
        self._tokens.append(tokens)
        self._at = now
        self._witness = next(reversed(running), None)
