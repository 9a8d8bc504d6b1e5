"""``EngineBoard``: whether engines take requests, their speeds and queued tokens, in columns."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

_KEPT: Final = 16  # latest timings kept of an engine, and of the fleet; chosen
_PRIOR_VARIANCE: Final = 0.5  # of the logarithm of one engine's timings, before it is known; chosen
_PRIOR_TIMINGS: Final = 8.0  # timings that the prior weighs as much as; chosen
_SLOWEST: Final = 4.0  # times the fastest engine's time per token; chosen: machines are alike
_OF_MEDIAN: Final = np.pi / 2  # variance of a median over that of a mean, of normal noise
_NO_MEDIAN: Final = 2  # timings up to which the median is the mean

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


class MeasuredSpeeds:
    """Estimates seconds per prompt token of each engine from noisy timings.

    Timings are taken relative to the fleet's level at that time, since load slows all engines. A
    single timing shows little: the prompt may have shared its step with others, or waited for a
    compiler. An engine wrongly taken to be fast gets most requests, and one wrongly taken to be
    slow gets too few to be timed again. So an engine's median is drawn towards the fleet's mean as
    far as noise explains the difference: a random-effects model in logarithms, whose variance
    between engines is estimated by moments (Hedges 1983). No engine is taken to be slower than
    ``_SLOWEST`` times the
    fastest.
    """

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=_KEPT)  # of the fleet, less the engine's effect
        self._timings = np.empty((0, _KEPT))  # logarithms, above the level
        self._medians, self._squares, self._effects = (np.empty(0) for _ in range(3))
        self._counts = np.empty(0, dtype=np.int64)

    @property
    def timed(self) -> Mask:
        return self._counts > 0

    def add(self) -> None:
        self._timings = np.pad(self._timings, ((0, 1), (0, 0)))
        for name in ("_medians", "_squares", "_effects", "_counts"):
            setattr(self, name, np.pad(getattr(self, name), (0, 1)))

    def note(self, engine: int, seconds_per_token: float) -> None:
        timing = float(np.log(seconds_per_token))
        level = float(np.median(self._latest)) if self._latest else timing
        self._timings[engine, self._counts[engine] % _KEPT] = timing - level
        self._counts[engine] += 1
        kept = self._timings[engine, : self._counts[engine]]
        self._medians[engine], self._squares[engine] = np.median(kept), kept.var() * len(kept)
        self._latest.append(timing - float(self._effects[engine]))
        self._effects = self._shrunk()

    def seconds(self) -> Floats | None:
        """Return seconds per prompt token, float64 ``[engines]``; an engine without timings has the
        fleet's mean. None before any timing.
        """
        if not self._latest:
            return None
        speeds: Floats = np.exp(np.median(self._latest) + self._effects)
        bounded: Floats = np.minimum(speeds, _SLOWEST * speeds.min())
        return bounded

    def _shrunk(self) -> Floats:
        """Each engine's logarithmic difference from the mean, less noise, float64 ``[engines]``."""
        counts, timed = np.minimum(self._counts, _KEPT), self.timed
        medians = self._medians[timed]
        mean = np.average(medians, weights=counts[timed])  # as timings weigh in the level
        freedom = _PRIOR_TIMINGS + float((counts[timed] - 1).sum())
        variance = (_PRIOR_TIMINGS * _PRIOR_VARIANCE + float(self._squares.sum())) / freedom
        by_chance = (
            variance * np.where(counts > _NO_MEDIAN, _OF_MEDIAN, 1.0) / np.maximum(counts, 1)
        )
        spread = medians.var(ddof=1) if len(medians) > 1 else 0.0
        between = max(0.0, float(spread - by_chance[timed].mean()))
        belief = np.where(timed, between / (between + by_chance), 0.0)
        effects: Floats = belief * (self._medians - mean)
        return effects


Tokens = npt.NDArray[np.int64]

_COLUMNS: Final = (
    "compute_s", "load_s", "fetch_s", "asked", "waiting", "live", "pool", "fresh", "refusing",
    "up", "draining",
)  # fmt: skip
MOST_REFUSING: Final = 8  # refusals in a row that are counted; chosen
_UNKNOWN_POOL: Final = 500_000  # tokens per pool, if no engine reports its pool's size; chosen


@dataclass(frozen=True, slots=True)
class Speed:
    """Speeds assumed for an engine until they are measured; only prefill is measured so far.

    The defaults are chosen: an 8B model on a GPU whose host memory is behind PCIe 5, and a store
    behind a network of 40 Gbit/s.
    """

    prefill_tokens_per_s: float = 20_000.0  # prompt tokens computed per second
    load_bytes_per_s: float = 50e9  # bandwidth of the engine's own host memory
    store_bytes_per_s: float = 5e9  # bandwidth of a store that engines share
    bytes_per_token: int = 131_072  # KV of one token in all layers; 131,072 for an 8B model in bf16
    pool_tokens: int = 0  # tokens that the engine's pool holds; 0: unknown


class EngineBoard:
    """Columns over engines. An engine's number is its index, and is never reused.

    Attributes:
        names: One per engine.
        compute_s: float64 ``[engines]``: seconds to compute a token of a prompt.
        load_s: float64 ``[engines]``: seconds to load a token's KV from the engine's own copies.
        fetch_s: float64 ``[engines]``: seconds to fetch a token's KV from the shared store.
        asked: float64 ``[engines]``: prompt tokens sent there, found or computed. They are halved
            each time that the fleet has received as many tokens as all its pools hold.
        waiting: int64 ``[engines]``: tokens of requests that are queued or running there.
        live: int64 ``[engines]``: tokens of the live sessions whose home it is.
        pool: int64 ``[engines]``: tokens that its pool holds; 0: unknown.
        fresh: int64 ``[engines]``: of ``live``, tokens of sessions with only one turn so far.
        refusing: int64 ``[engines]``: consecutive requests that it refused, or dropped while
            another engine answered them; at most ``MOST_REFUSING``.
        up: bool ``[engines]``: whether the engine answers health checks.
        draining: bool ``[engines]``: whether it finishes its requests and gets no new ones.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.compute_s, self.load_s, self.fetch_s, self.asked = np.zeros((4, 0))
        empty = np.zeros((5, 0), dtype=np.int64)
        self.waiting, self.live, self.pool, self.fresh, self.refusing = empty
        self.up, self.draining = np.zeros((2, 0), dtype=np.bool_)
        self._speeds = MeasuredSpeeds()

    def __len__(self) -> int:
        return len(self.names)

    def add(self, name: str, speed: Speed | None = None) -> int:
        """Add an engine that takes requests; returns its number."""
        number, speed = len(self.names), speed or Speed()
        self.names.append(name)
        first = {
            "compute_s": 1 / speed.prefill_tokens_per_s,
            "load_s": speed.bytes_per_token / speed.load_bytes_per_s,
            "fetch_s": speed.bytes_per_token / speed.store_bytes_per_s,
            "pool": speed.pool_tokens,
            "up": True,
        }
        for column in _COLUMNS:
            before = getattr(self, column)
            setattr(self, column, np.append(before, before.dtype.type(first.get(column, 0))))
        self._speeds.add()
        self._take_speeds()  # as the others, once any was timed
        return number

    @property
    def timed(self) -> Mask:
        return self._speeds.timed

    @property
    def takes(self) -> Mask:
        """Return which engines are up and not draining, and so get requests: bool ``[engines]``."""
        return self.up & ~self.draining

    def ask(self, number: int, tokens: int) -> None:
        known = self.pool[self.pool > 0]
        pools = len(self) * (float(known.mean()) if len(known) else _UNKNOWN_POOL)
        asked = self.asked
        asked *= 0.5 ** (tokens / pools)
        asked[number] += tokens

    def note_answer(self, number: int, refused: bool) -> None:
        before = int(self.refusing[number])
        self.refusing[number] = min(MOST_REFUSING, before + 1) if refused else 0

    def measured(self, number: int, tokens: int, seconds: float) -> None:
        """Note that an engine computed ``tokens`` prompt tokens in ``seconds``."""
        if tokens <= 0 or seconds <= 0:
            return
        self._speeds.note(number, seconds / tokens)
        self._take_speeds()

    def _take_speeds(self) -> None:
        if (seconds := self._speeds.seconds()) is not None:
            self.compute_s[:] = seconds
