"""Samples decode steps of vLLM's model runner, within a budget of time."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from .looks import Look
from .measuring import Looked, Measured, Measuring
from .runners import Runner
from .sampling_budget import SamplingBudget
from .shadows import Shadows
from .step_times import StepTimes

if TYPE_CHECKING:
    from ....kernels.tensors import Tensor

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
