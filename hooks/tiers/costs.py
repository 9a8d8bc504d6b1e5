"""Load or compute again: what each would take, learned from what both really took."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

_SHARE: Final = 0.2  # of the newest sample in each mean
_FADE: Final = 0.97  # of what speaks against loading, each time that it prevails
_LEAST_TOKENS: Final = 64  # steps with fewer say little about prefill
_LEAST_BYTES: Final = 1 << 20  # transfers of fewer say little about bandwidth
_MOST_STEPS: Final = 4  # under way at once; a runner may leave the end of an idle step untold


class TransferCosts:
    """Means of bandwidth and of prefill speed; without a sample a load is always tried.

    A load takes its bytes' way, behind those under way, through memory or the disk. For steps and
    for its turn a request waits either way, and longer where all compute again what they could
    load: so waiting counts for neither. Where loading loses, what was measured fades a little, so
    that some load is tried again and the means cannot be wrong for ever.

    Attributes:
        load_bytes_per_s: From memory; 0 before the first sample, as the others.
        disk_bytes_per_s: From the disk, by memory.
        spill_bytes_per_s: Into memory.
        prefill_tokens_per_s: Of steps that are not all decoding.
        queued_bytes: Of loads that are under way.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.load_bytes_per_s = 0.0
        self.disk_bytes_per_s = 0.0
        self.spill_bytes_per_s = 0.0
        self.prefill_tokens_per_s = 0.0
        self.queued_bytes = 0
        self._clock = clock
        self._steps: deque[tuple[int, float]] = deque(maxlen=_MOST_STEPS)
        self._last_end = float("-inf")

    def worth_loading(self, tokens: int, warm_bytes: int, cold_bytes: int) -> bool:
        """Whether these bytes for ``tokens`` tokens come sooner than the tokens are computed."""
        if not self.prefill_tokens_per_s:
            return True
        if self.load_s(warm_bytes, cold_bytes) <= tokens / self.prefill_tokens_per_s:
            return True
        self.load_bytes_per_s /= _FADE
        self.disk_bytes_per_s /= _FADE
        return False

    def load_s(self, warm_bytes: int, cold_bytes: int) -> float:
        """What a load takes, behind those under way; 0 where nothing was measured yet."""
        load_s = _over(self.queued_bytes + warm_bytes, self.load_bytes_per_s)
        return load_s + _over(cold_bytes, self.disk_bytes_per_s)

    def loaded(self, size: int, transfer_s: float, from_disk: bool) -> None:
        """A load of ``size`` bytes took ``transfer_s``."""
        if from_disk:
            self.disk_bytes_per_s = _speed(self.disk_bytes_per_s, size, transfer_s)
        else:
            self.load_bytes_per_s = _speed(self.load_bytes_per_s, size, transfer_s)

    def spilled(self, size: int, transfer_s: float) -> None:
        """A spill of ``size`` bytes took ``transfer_s``."""
        self.spill_bytes_per_s = _speed(self.spill_bytes_per_s, size, transfer_s)

    def step_began(self, tokens: int) -> None:
        """A step with ``tokens`` tokens was scheduled."""
        self._steps.append((tokens, self._clock()))

    def step_ended(self) -> None:
        """The oldest step's output arrived. Steps overlap: one begins when the last has ended."""
        if not self._steps:
            return
        tokens, began = self._steps.popleft()
        now = self._clock()
        took = now - max(began, self._last_end)
        self._last_end = now
        if tokens >= _LEAST_TOKENS and took > 0:
            self.prefill_tokens_per_s = _mean(self.prefill_tokens_per_s, tokens / took)


def _speed(mean: float, size: int, seconds: float) -> float:
    return _mean(mean, size / seconds) if size >= _LEAST_BYTES and seconds > 0 else mean


def _mean(mean: float, sample: float) -> float:
    return mean + _SHARE * (sample - mean) if mean else sample


def _over(size: int, speed: float) -> float:
    return size / speed if speed else 0.0
