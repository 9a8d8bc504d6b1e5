"""Samples decode steps of vLLM's model runner, within a time budget."""

from __future__ import annotations

import functools
import logging
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from .measuring import LayerQuery, PendingMeasures, SampledRequest, StepMeasurer
from .runners import MethodPatches, Runner

if TYPE_CHECKING:
    from ....kernels.tensors import Tensor

LONGEST_S: Final = 1.0  # from one sampled step to the next, while the engine decodes; chosen
_EARLY_S: Final = 0.05  # a step up to this long does not delay the next sample; chosen
_SHORTEST_S: Final = 0.1  # least time between samples; chosen
_SAVED_S: Final = 20.0  # seconds of use whose share may be saved up or owed; chosen
_OUTLIER: Final = 3.0  # times the estimate; beyond, other work delayed the sample. Chosen
_NEWEST: Final = 0.3  # share of the newest cost in the estimates; chosen
_LAYER_TOKEN_S: Final = 1e-6  # first estimate of one layer's cost per token; a guess
_LEAST_S: Final = 1e-4  # first estimate of a step that samples no layer; a guess
_STRICT_LAYER_TOKEN_S: Final = 1e-8  # as _LAYER_TOKEN_S, on a GPU; a guess
_STRICT_S: Final = 0.05  # cost of a step without its CUDA graph; a guess, on the safe side
_LEAST_LAYER_TOKEN_S: Final = 1e-10  # floor, so that an estimate can grow again; chosen

Clock = Callable[[], float]


class SamplingBudget:
    """Decides which steps are sampled, and how many layers of each.

    A step is sampled at least every ``LONGEST_S`` seconds, with as many layers as the budget
    allows, and sooner if it allows all of them. The cost of a sample is estimated from measured
    ones.

    Args:
        clock: Monotonic seconds.
        used: Seconds of CPU, or of GPU, that the engine has used.
        share: Share of that time that samples may take.
        strict: Wait until the budget covers the expected cost, however long that takes, and repay
            every overrun.

    Attributes:
        steps, with_layers: Number of sampled steps, and of those with sampled layers.
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
        # expected cost of a sample in seconds, at the last context length and with all layers
        self.expected_s = self._plain.value
        self.steps = self.with_layers = 0
        self.spent_s = 0.0  # seconds that they took

    def is_due(self) -> bool:
        """Return whether this decode step is to be sampled; stays true until ``took`` is called."""
        now = self._clock()
        if now < self._next:
            return False
        self._next = min(now + _SHORTEST_S, self._deadline)
        used = self._now_used()
        most = max(self._share * _SAVED_S, self.expected_s)
        self._balance = min(most, self._balance + self._share * (used - self._used))
        self._used = used
        if self._balance < self.expected_s and now < self._deadline:
            return False
        self._next = now
        return True

    def layers(self, tokens: int, most: int) -> int:
        """Return how many layers, ``most`` at most, the budget pays for a context of ``tokens``."""
        spare, each = self._balance - self._plain.value, self._layer_token.value * max(1, tokens)
        self.expected_s = self._plain.value + each * most
        return max(0, min(most, int(spare / each)))

    def took(self, seconds: float, layers: int, tokens: int) -> None:
        self.steps += 1
        self.with_layers += layers > 0
        self.spent_s += seconds
        self._balance = max(self._balance - seconds, -self._owed)
        now = self._clock()
        self._next = now + _SHORTEST_S
        # Counted from when this sample was due, not from the later step that took it.
        deadline = min(self._deadline, now) + self._longest
        self._deadline = deadline if deadline > now else now + self._longest
        if not layers or seconds < self._plain.value:
            self._plain.follow(seconds)
        if layers:
            each = (seconds - self._plain.value) / (layers * max(1, tokens))
            self._layer_token.follow(max(_LEAST_LAYER_TOKEN_S, each))


class _Estimate:
    """A running mean that ignores a single outlier; two in a row count."""

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


# A sampled step runs without its CUDA graph, and the GPU is still working on it when the runner
# continues. So its cost shows only as a later start of the next steps.

_REMEMBERED: Final = 32  # steps remembered per batch size; chosen
_ENOUGH: Final = 8  # steps timed before one of that size is sampled; chosen
_WINDOW: Final = 3  # steps that a sample may delay: as many as vLLM overlaps, plus one
_UNKNOWN: Final = 0  # stands for a step that does more than decode


class StepTimes:
    """Times decode-only steps, from the start of one to the start of the next. A step counts if the
    next one decodes as many requests, since the engine was then busy in between.
    """

    def __init__(self, clock: Callable[[], float], sizes: Sequence[int]) -> None:
        self._clock, self._sizes = clock, tuple(sizes)
        self._times: dict[int, deque[float]] = {}
        self._began, self._decoding = clock(), _UNKNOWN
        self._extra: list[float] | None = None  # of the steps since a sampled one began
        self._broken = False  # other work followed: the sample's cost cannot be measured further
        self._busy_s = 0.0

    def busy(self) -> float:
        """Total seconds of the steps that count."""
        return self._busy_s

    def begin(self, scheduler_output: Any) -> None:
        now, decoding = self._clock(), _decoding(scheduler_output)
        if decoding == self._decoding != _UNKNOWN:
            self._passed(now - self._began)
        else:
            self._broken = self._extra is not None
        self._began, self._decoding = now, decoding

    @property
    def can_tell(self) -> bool:
        """Whether the cost of sampling this step could be measured."""
        if self._extra is not None or self._decoding == _UNKNOWN:
            return False
        return len(self._times.get(self._size(), ())) >= _ENOUGH

    def sampling(self) -> None:
        """Note that this step is sampled, so it and the next ones may take longer."""
        self._extra = []

    def settled(self, expected: float) -> float | None:
        """Return the cost of the last sampled step in seconds, once; None while it is unknown. It
        is at least ``expected`` if other work cut the measurement short.
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
    """Return how many requests a step decodes, one token each; ``_UNKNOWN`` if it does more."""
    count = len(scheduler_output.num_scheduled_tokens)
    if scheduler_output.scheduled_new_reqs:
        return _UNKNOWN
    return count if scheduler_output.total_num_scheduled_tokens == count else _UNKNOWN


logger = logging.getLogger(__name__)

_TOKENS: Final = 1 << 17  # longest context whose attention is sampled; chosen


class SampledLayer(NamedTuple):
    place: int  # index of the layer in the cache
    impl: Any  # vLLM's attention object; its `forward` is patched on sampled steps


class SamplingTarget(NamedTuple):
    row: int  # its row in the batch
    query: int  # index of its token in the batch
    tokens: int  # length of its context, newest token included
    layers: int  # how many layers are sampled


class StepSampler:
    """Patches sampler and attention on sampled steps; a failure ends sampling, with a log line."""

    def __init__(
        self, runner: Runner, measuring: StepMeasurer, layers: Sequence[SampledLayer],
        budget: SamplingBudget, cpu: Callable[[], float], times: StepTimes | None = None,
    ) -> None:  # fmt: skip
        self._runner, self._measuring, self._layers = runner, measuring, tuple(layers)
        self.budget, self._cpu, self._times = budget, cpu, times
        self._execute: Callable[..., Any] = runner.model_runner.execute_model
        self._patches, self._graph_patch = MethodPatches(), MethodPatches()
        self._queries: list[LayerQuery] = []
        self._target: SamplingTarget | None = None
        self._measured: PendingMeasures | None = None
        self._cost = 0.0
        self._turn = 0

    def attach(self) -> None:
        self._runner.model_runner.execute_model = self.execute_model

    def detach(self) -> None:
        self._patches.undo()
        self._graph_patch.undo()
        vars(self._runner.model_runner).pop("execute_model", None)

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if "dummy_run" in kwargs:  # V2's, to warm up
            return self._execute(scheduler_output, *args, **kwargs)
        self._guarded(self._begin, scheduler_output)
        try:
            answer = self._execute(scheduler_output, *args, **kwargs)
        finally:
            self._graph_patch.undo()
        if answer is None and self._measured is not None:
            self._guarded(self._report)
        return answer

    def _begin(self, scheduler_output: Any) -> None:
        if self._patches:
            self._patches.undo()
        if self._times is not None:
            self._times.begin(scheduler_output)
            self._settle(self._times)
            if self._measured is not None or not self._times.can_tell:
                return
        # Of a request that decodes, a step computes one token.
        if self.budget.is_due() and 1 in scheduler_output.num_scheduled_tokens.values():
            self._arm()

    def _settle(self, times: StepTimes) -> None:
        cost = times.settled(self.budget.expected_s)
        if cost is not None:
            target = self._target
            self.budget.took(cost, len(self._queries), target.tokens if target else 1)

    def _arm(self) -> None:
        self._queries, self._target, self._cost = [], None, 0.0
        for layer in self._layers:
            self._patches.patch(layer.impl, "forward", functools.partial(self._attend, layer))
        self._patches.patch(*self._runner.sampler, self._sample)
        self._runner.watch(self._patches)
        if self._times is not None:
            self._times.sampling()
            self._graph_patch.patch(self._runner.dispatcher, "dispatch", self._dispatch)

    def _dispatch(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Dispatch without a full CUDA graph, since its attention cannot be observed."""
        try:
            return self._runner.without_full_graph(original, *args, **kwargs)
        except Exception as error:
            self._give_up(error)
        return original(*args, **kwargs)

    def _attend(
        self, layer: SampledLayer, original: Callable[..., Any], owner: Any, query: Tensor,
        *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        self._guarded(self._keep_query, layer, query)
        return original(owner, query, *args, **kwargs)

    def _sample(
        self, original: Callable[..., Any], logits: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        self._guarded(self._measure, logits)
        return original(logits, *args, **kwargs)

    def _keep_query(self, layer: SampledLayer, query: Tensor) -> None:
        # A copy is kept, because the next layer reuses the batch's memory.
        began = self._cpu()
        if self._target is None:
            self._target = self._next_target()
        target = self._target
        if len(self._queries) < target.layers:
            row = query[target.query].reshape(-1, layer.impl.head_size)
            self._queries.append(LayerQuery(layer.place, row.clone(), float(layer.impl.scale)))
        self._cost += self._cpu() - began

    def _next_target(self) -> SamplingTarget:
        """Choose the next decoding request in turn, and as many layers as the budget pays for."""
        batch = self._runner.batch()
        starts = batch.starts
        rows = [row for row in range(len(batch.names)) if starts[row + 1] - starts[row] == 1]
        self._turn += 1
        row = rows[self._turn % len(rows)]
        tokens = int(batch.computed[row]) + 1
        most = len(self._layers) if tokens <= _TOKENS else 0
        return SamplingTarget(row, int(starts[row]), tokens, self.budget.layers(tokens, most))

    def _measure(self, logits: Tensor) -> None:
        began = self._cpu()
        target = self._target = self._target or self._next_target()
        self._patches.undo()
        batch = self._runner.batch()
        if len(logits) == len(batch.names):  # else there is no one row per request
            sampled = SampledRequest(self._queries, batch.table(target.row), target.tokens)
            self._measured = self._measuring.begin(batch.names, logits, target.row, sampled)
            self._report()
        if self._times is None:
            cost = self._cost + self._cpu() - began
            self.budget.took(cost, len(self._queries), target.tokens)

    def _report(self) -> None:
        measured = self._measured
        if measured is not None and measured.arrived():
            self._measured = None
            self._runner.hand(self._measuring.samples(measured))

    def _guarded(self, act: Callable[..., None], *args: Any) -> None:
        try:
            act(*args)
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self.detach()
        logger.warning(  # the type only: a message may quote request content
            "kvgraph: decode steps are sampled no more after %s",
            type(error).__name__,
            exc_info=logger.isEnabledFor(logging.DEBUG),
        )
