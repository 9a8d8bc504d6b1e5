"""Samples decode steps of vLLM's model runner, within a budget of time."""

from __future__ import annotations

import functools
import logging
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from .measuring import Look, Looked, Measured, Measuring
from .runners import Runner, Shadows

if TYPE_CHECKING:
    from ....kernels.tensors import Tensor

# How often a decode step is sampled, and how much of it: by a share of the engine's time.

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


# How long decode steps take on a GPU, and how much longer those take that are sampled.
#
# A sampled step does without its CUDA graph, and the GPU works on it after the runner has gone
# on. So what it costs is seen in the clock alone: in how much later than usual the next steps
# begin.

_REMEMBERED: Final = 32  # steps of a size; chosen
_ENOUGH: Final = 8  # of them, before a step of that size is sampled; chosen
_WINDOW: Final = 3  # steps from a sampled one on: as many as vLLM has under way at once, and one
_UNKNOWN: Final = 0  # requests that decode, where a step does anything else too


class StepTimes:
    """Times from one step's beginning to the next one's, of steps that only decode.

    They count where the next step decodes as many requests: then the engine was busy in between.

    Args:
        clock: Monotonic seconds.
        sizes: Batches that CUDA graphs were captured for, ascending: others are padded to them.
    """

    def __init__(self, clock: Callable[[], float], sizes: Sequence[int]) -> None:
        self._clock, self._sizes = clock, tuple(sizes)
        self._times: dict[int, deque[float]] = {}
        self._began, self._decoding = clock(), _UNKNOWN
        self._extra: list[float] | None = None  # of the steps since a sampled one began
        self._broken = False  # no more can be told of them
        self._busy_s = 0.0

    def busy(self) -> float:
        """Seconds of all the steps that count."""
        return self._busy_s

    def begin(self, scheduler_output: Any) -> None:
        """Note that a step begins."""
        now, decoding = self._clock(), _decoding(scheduler_output)
        if decoding == self._decoding != _UNKNOWN:
            self._passed(now - self._began)
        else:
            self._broken = self._extra is not None
        self._began, self._decoding = now, decoding

    @property
    def can_tell(self) -> bool:
        """Whether it will be known what it costs to sample this step."""
        if self._extra is not None or self._decoding == _UNKNOWN:
            return False
        return len(self._times.get(self._size(), ())) >= _ENOUGH

    def sampling(self) -> None:
        """This step is sampled: it and the next ones may take longer."""
        self._extra = []

    def settled(self, expected: float) -> float | None:
        """Seconds that the last sampled step cost, told once; None while that is not known.

        Args:
            expected: What it is taken for at least, where other work came too soon behind it.
        """
        if self._extra is None or (len(self._extra) < _WINDOW and not self._broken):
            return None
        least = expected if self._broken else 0.0
        extra, self._extra, self._broken = self._extra, None, False
        return max(least, sum(extra))

    def _passed(self, seconds: float) -> None:
        self._busy_s += seconds
        times = self._times.setdefault(self._size(), deque(maxlen=_REMEMBERED))
        if self._extra is None:
            times.append(seconds)
        else:
            self._extra.append(seconds - median(times) if times else 0.0)

    def _size(self) -> int:
        at = bisect_left(self._sizes, self._decoding)
        return self._sizes[at] if at < len(self._sizes) else self._decoding


def _decoding(scheduler_output: Any) -> int:
    """How many requests a step decodes, one token each; ``_UNKNOWN`` if it does more."""
    count = len(scheduler_output.num_scheduled_tokens)
    if scheduler_output.scheduled_new_reqs:
        return _UNKNOWN
    return count if scheduler_output.total_num_scheduled_tokens == count else _UNKNOWN


logger = logging.getLogger(__name__)

_TOKENS: Final = 1 << 17  # of a context whose attention is sampled at most; chosen


class SampledLayer(NamedTuple):
    """An attention layer that may be sampled.

    Attributes:
        place: Of the layer in the cache.
        impl: vLLM's; its ``forward`` is shadowed on sampled steps.
    """

    place: int
    impl: Any


class Chosen(NamedTuple):
    """The request whose attention is sampled on this step.

    Attributes:
        row: In the batch.
        query: In the batch's tokens.
        tokens: That it sees, its newest one included.
        layers: How many layers are sampled.
    """

    row: int
    query: int
    tokens: int
    layers: int


class StepSampler:
    """Shadows a runner's sampler and attention on sampled steps alone.

    Whatever fails ends sampling for good, with one line; the engine goes on.

    Args:
        runner: vLLM's model runner.
        measuring: Measures its steps.
        layers: That may be sampled, at most 16 of them are.
        budget: Says when, and how much.
        cpu: CPU seconds that this process has used.
        times: How long steps take, where samples cost time of a GPU; None: they cost CPU time.

    Attributes:
        budget: As it was given; it counts what samples cost.
    """

    def __init__(
        self, runner: Runner, measuring: Measuring, layers: Sequence[SampledLayer],
        budget: SamplingBudget, cpu: Callable[[], float], times: StepTimes | None = None,
    ) -> None:  # fmt: skip
        self._runner, self._measuring, self._layers = runner, measuring, tuple(layers)
        self.budget, self._cpu, self._times = budget, cpu, times
        self._execute: Callable[..., Any] = runner.model_runner.execute_model
        self._seen, self._graphs = Shadows(), Shadows()
        self._looks: list[Look] = []
        self._chosen: Chosen | None = None
        self._measured: Measured | None = None
        self._cost = 0.0
        self._turn = 0

    def attach(self) -> None:
        """Look at each step from now on."""
        self._runner.model_runner.execute_model = self.execute_model

    def detach(self) -> None:
        """Leave the runner as it was."""
        self._seen.lift()
        self._graphs.lift()
        vars(self._runner.model_runner).pop("execute_model", None)

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """The runner's own, with shadows on what is sampled of this step."""
        if "dummy_run" in kwargs:  # V2's, to warm up
            return self._execute(scheduler_output, *args, **kwargs)
        self._guarded(self._begin, scheduler_output)
        try:
            answer = self._execute(scheduler_output, *args, **kwargs)
        finally:
            self._graphs.lift()
        if answer is None and self._measured is not None:
            self._guarded(self._tell)
        return answer

    def _begin(self, scheduler_output: Any) -> None:
        if self._seen:
            self._seen.lift()
        if self._times is not None:
            self._times.begin(scheduler_output)
            self._settle(self._times)
            if self._measured is not None or not self._times.can_tell:
                return
        if self.budget.is_due() and _decodes(scheduler_output):
            self._arm()

    def _settle(self, times: StepTimes) -> None:
        cost = times.settled(self.budget.expected_s)
        if cost is not None:
            chosen = self._chosen
            self.budget.took(cost, len(self._looks), chosen.tokens if chosen else 1)

    def _arm(self) -> None:
        self._looks, self._chosen, self._cost = [], None, 0.0
        for layer in self._layers:
            self._seen.lay(layer.impl, "forward", functools.partial(self._attend, layer))
        self._seen.lay(*self._runner.sampler, self._sample)
        self._runner.watch(self._seen)
        if self._times is not None:
            self._times.sampling()
            self._graphs.lay(self._runner.dispatcher, "dispatch", self._dispatch)

    def _dispatch(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A graph without attention inside, or none: for this step, attention is called."""
        try:
            return self._runner.without_full_graph(original, *args, **kwargs)
        except Exception as error:
            self._give_up(error)
        return original(*args, **kwargs)

    def _attend(
        self, layer: SampledLayer, original: Callable[..., Any], owner: Any, query: Tensor,
        *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        self._guarded(self._look, layer, query)
        return original(owner, query, *args, **kwargs)

    def _sample(
        self, original: Callable[..., Any], logits: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        self._guarded(self._measure, logits)
        return original(logits, *args, **kwargs)

    def _look(self, layer: SampledLayer, query: Tensor) -> None:
        """Keep the chosen request's query: the batch's memory is used again by the next layer."""
        began = self._cpu()
        if self._chosen is None:
            self._chosen = self._choose()
        chosen = self._chosen
        if len(self._looks) < chosen.layers:
            row = query[chosen.query].reshape(-1, layer.impl.head_size)
            self._looks.append(Look(layer.place, row.clone(), float(layer.impl.scale)))
        self._cost += self._cpu() - began

    def _choose(self) -> Chosen:
        """The next request in turn that decodes, and as many layers as there is time for."""
        batch = self._runner.batch()
        starts = batch.starts
        rows = [row for row in range(len(batch.names)) if starts[row + 1] - starts[row] == 1]
        self._turn += 1
        row = rows[self._turn % len(rows)]
        tokens = int(batch.computed[row]) + 1
        most = len(self._layers) if tokens <= _TOKENS else 0
        return Chosen(row, int(starts[row]), tokens, self.budget.layers(tokens, most))

    def _measure(self, logits: Tensor) -> None:
        """Measure, and have what comes out told beside a step's other words to the scheduler."""
        began = self._cpu()
        chosen = self._chosen = self._chosen or self._choose()
        self._seen.lift()
        batch = self._runner.batch()
        if len(logits) == len(batch.names):  # else there is no one row per request
            looked = Looked(self._looks, batch.table(chosen.row), chosen.tokens)
            self._measured = self._measuring.begin(batch.names, logits, chosen.row, looked)
            self._tell()
        if self._times is None:
            cost = self._cost + self._cpu() - began
            self.budget.took(cost, len(self._looks), chosen.tokens)

    def _tell(self) -> None:
        """Hand over what was measured, once it is here."""
        measured = self._measured
        if measured is not None and measured.values.arrived():
            self._measured = None
            self._runner.hand(self._measuring.samples(measured))

    def _guarded(self, act: Callable[..., None], *args: Any) -> None:
        try:
            act(*args)
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self.detach()
        logger.warning(  # the type only: a message may quote what it choked on
            "kvgraph: decode steps are sampled no more after %s",
            type(error).__name__,
            exc_info=logger.isEnabledFor(logging.DEBUG),
        )


def _decodes(scheduler_output: Any) -> bool:
    return 1 in scheduler_output.num_scheduled_tokens.values()
