"""``TransferCosts``: whether to load or to compute blocks, by the measured speed of both."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

_SHARE: Final = 0.2  # weight of the newest sample in each mean; chosen
_FADE: Final = 0.97  # bandwidths are divided by this each time that computing wins; chosen
_LEAST_TOKENS: Final = 64  # steps with fewer say little about prefill; chosen
_LEAST_BYTES: Final = 1 << 20  # smaller transfers say little about bandwidth; chosen
_LEAST_ASKED_S: Final = (
    0.05  # seconds of computing from which a store is asked; chosen: some decode steps
)
_UNMEASURED_LIMIT_S: Final = 1.0  # of reading a store, before prefill was measured; chosen
_LEAST_LIMIT_S: Final = 0.25  # of reading it, however little there is to compute; chosen
_MOST_STEPS: Final = 4  # steps running at once; chosen


class TransferCosts:
    """Running means of bandwidth and prefill speed; without a sample, a load is always tried.

    Load time = (bytes queued before it + its own bytes) / bandwidth. The time that a request waits
    for the scheduler is not counted, since it waits whether it loads or computes. Each time
    computing wins, the bandwidth estimates are raised by 3 %, so that a load is eventually tried
    again and a wrong estimate cannot last.

    A splice may be short, but its end reaches the scheduler only in a later step. So its cost
    includes that wait, unless the request loads exact copies anyway. The step that would compute
    its text runs in any case, for the text after it: so computing costs only what more tokens add
    to a step.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        # From host memory to the pool; this and the others are 0 before their first sample.
        self.load_bytes_per_s = 0.0
        self.disk_bytes_per_s = 0.0  # from disk to host memory
        self.store_bytes_per_s = 0.0  # from the shared store to host memory
        self.spill_bytes_per_s = 0.0  # from the pool to host memory
        # From host memory to other positions of the pool, of whole records.
        self.splice_bytes_per_s = 0.0
        # From a splice's end to the step in which the scheduler receives it.
        self.splice_wait_s = 0.0
        self.splices_always = False  # whether text is spliced also where computing it is quicker
        self.prefill_tokens_per_s = 0.0  # in steps that do not only decode
        # What a token adds to such a step, beside one that computes next to nothing.
        self.token_s = 0.0
        self.queued_bytes = 0  # bytes of loads under way
        self._clock = clock
        self._short_step_s = 0.0
        self._steps: deque[tuple[int, float]] = deque(maxlen=_MOST_STEPS)
        self._last_end = float("-inf")

    def worth_loading(
        self, tokens: int, warm_bytes: int, cold_bytes: int, store_bytes: int = 0
    ) -> bool:
        """Return whether loading these bytes takes no longer than computing ``tokens`` tokens. If
        it takes longer, raises the bandwidth estimates a little; see the class.
        """
        if not self.prefill_tokens_per_s:
            return True
        if self.load_s(warm_bytes, cold_bytes, store_bytes) <= tokens / self.prefill_tokens_per_s:
            return True
        self.load_bytes_per_s /= _FADE
        self.disk_bytes_per_s /= _FADE
        self.store_bytes_per_s /= _FADE
        return False

    def worth_splicing(self, tokens: int, record_bytes: int, loads: bool) -> bool:
        """Return whether splicing ``tokens`` takes no longer than computing them."""
        if self.splices_always or not self.prefill_tokens_per_s:
            return True
        takes_s = _over(self.queued_bytes + record_bytes, self.splice_bytes_per_s)
        takes_s += 0.0 if loads else self.splice_wait_s
        if takes_s <= tokens * self.token_s:
            return True
        self.splice_bytes_per_s /= _FADE
        self.splice_wait_s *= _FADE
        return False

    def load_s(self, warm_bytes: int, cold_bytes: int, store_bytes: int = 0) -> float:
        """Return the seconds that a load takes, including loads before it; 0 before any sample."""
        load_s = _over(self.queued_bytes + warm_bytes, self.load_bytes_per_s)
        load_s += _over(store_bytes, self.store_bytes_per_s)
        return load_s + _over(cold_bytes, self.disk_bytes_per_s)

    def worth_asking(self, tokens: int) -> bool:
        """Return whether looking up ``tokens`` tokens in the store is worth waiting a step for."""
        if not self.prefill_tokens_per_s:
            return True
        return tokens / self.prefill_tokens_per_s > _LEAST_ASKED_S

    def store_limit_s(self, tokens: int) -> float:
        """Return how long a load of ``tokens`` tokens may read the store: as long as computing them
        takes. So a slow store costs a request no more than the time of one more prefill.
        """
        if not self.prefill_tokens_per_s:
            return _UNMEASURED_LIMIT_S
        return max(_LEAST_LIMIT_S, tokens / self.prefill_tokens_per_s)

    def loaded(
        self, size: int, transfer_s: float, from_disk: bool, from_store: bool = False
    ) -> None:
        if from_store:
            self.store_bytes_per_s = _speed(self.store_bytes_per_s, size, transfer_s)
        elif from_disk:
            self.disk_bytes_per_s = _speed(self.disk_bytes_per_s, size, transfer_s)
        else:
            self.load_bytes_per_s = _speed(self.load_bytes_per_s, size, transfer_s)

    def spliced(self, size: int, transfer_s: float, waited_s: float) -> None:
        """Note that a load with splices, of ``size`` bytes, took ``transfer_s`` seconds, and that
        the scheduler received its end ``waited_s`` seconds after ordering it.
        """
        self.splice_bytes_per_s = _speed(self.splice_bytes_per_s, size, transfer_s)
        self.splice_wait_s = _mean(self.splice_wait_s, max(0.0, waited_s - transfer_s))

    def spilled(self, size: int, transfer_s: float) -> None:
        self.spill_bytes_per_s = _speed(self.spill_bytes_per_s, size, transfer_s)

    def step_began(self, tokens: int, now: float | None = None) -> None:
        """Note that a step with ``tokens`` tokens was scheduled, at this time of the clock's."""
        # The end of an empty step is reported only if a transfer ended; waiting for it in vain
        # would pair all later steps with wrong ends.
        if tokens:
            self._steps.append((tokens, self._clock() if now is None else now))

    def step_ended(self) -> None:
        """Note that the oldest step's output arrived. Steps overlap, so each is timed from the end
        of the previous one.
        """
        if not self._steps:
            return
        tokens, began = self._steps.popleft()
        now = self._clock()
        took = now - max(began, self._last_end)
        self._last_end = now
        if took > 0 and tokens >= _LEAST_TOKENS:
            self.prefill_tokens_per_s = _mean(self.prefill_tokens_per_s, tokens / took)
            self.token_s = _mean(self.token_s, max(0.0, took - self._short_step_s) / tokens)
        elif took > 0:
            self._short_step_s = _mean(self._short_step_s, took)


def _speed(mean: float, size: int, seconds: float) -> float:
    return _mean(mean, size / seconds) if size >= _LEAST_BYTES and seconds > 0 else mean


def _mean(mean: float, sample: float) -> float:
    return mean + _SHARE * (sample - mean) if mean else sample


def _over(size: int, speed: float) -> float:
    return size / speed if speed else 0.0
