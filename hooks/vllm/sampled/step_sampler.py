"""Samples decode steps of vLLM's model runner, within a budget of CPU time."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from ....kernels.backends.confidence_score import confidence_score
from .looks import Look, Meanings, attended
from .sample_words import Sample, with_samples
from .sampling_budget import SamplingBudget

if TYPE_CHECKING:
    from ....kernels.layout.layout import PagedKv
    from ....kernels.maths.rope import Rope
    from ....kernels.tensors import Tensor

logger = logging.getLogger(__name__)

_ROWS: Final = 8  # requests whose confidence is taken per sampled step; chosen
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
        cache: Its paged memory.
        layers: That may be sampled, at most 16 of them are.
        rope: How keys are rotated; None: not at all.
        budget: Says when, and how much.
        cpu: CPU seconds that this process has used.

    Attributes:
        budget: As it was given; it counts what samples cost.
    """

    def __init__(
        self, runner: Any, cache: PagedKv, layers: Sequence[SampledLayer], rope: Rope | None,
        budget: SamplingBudget, cpu: Callable[[], float],
    ) -> None:  # fmt: skip
        self._runner, self._cache, self._layers = runner, cache, tuple(layers)
        self.budget, self._cpu = budget, cpu
        self._meanings = Meanings(cache, rope)
        self._execute: Callable[..., Any] = runner.execute_model
        self._armed = False
        self._looks: list[Look] = []
        self._chosen: Chosen | None = None
        self._cost = 0.0
        self._turn = 0

    def warm_up(self) -> None:
        """Measure made queries once, so that no step waits for what the first measure takes."""
        if self._layers:
            block, size = torch.zeros(1, dtype=torch.int64), self._cache.layout.tokens
            look = Look(0, torch.zeros(self._cache.layout.heads, self._cache.layout.key.dims), 1.0)
            mass = attended(self._cache, [look], block, size)
            self._meanings.of("", block, mass)
        confidence_score(torch.zeros(2, 8))

    def attach(self) -> None:
        """Look at each step from now on."""
        self._runner.execute_model = self.execute_model

    def detach(self) -> None:
        """Leave the runner as it was."""
        self._disarm()
        vars(self._runner).pop("execute_model", None)

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """The runner's own, with shadows on what is sampled of this step."""
        if self._armed:
            self._disarm()
        if self.budget.is_due() and _decodes(scheduler_output):
            self._guarded(self._arm)
        return self._execute(scheduler_output, *args, **kwargs)

    def _arm(self) -> None:
        self._looks, self._chosen, self._cost, self._armed = [], None, 0.0, True
        for layer in self._layers:
            layer.impl.forward = functools.partial(self._attend, layer, layer.impl.forward)
        sampler = self._runner.sampler
        sampler.forward = functools.partial(self._sample, sampler.forward)

    def _disarm(self) -> None:
        self._armed = False
        for shadowed in (*(layer.impl for layer in self._layers), self._runner.sampler):
            vars(shadowed).pop("forward", None)

    def _attend(
        self, layer: SampledLayer, original: Callable[..., Any], owner: Any, query: Tensor,
        *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        self._guarded(lambda: self._look(layer, query))
        return original(owner, query, *args, **kwargs)

    def _sample(
        self, original: Callable[..., Any], logits: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        self._guarded(lambda: self._measure(logits))
        return original(logits, *args, **kwargs)

    def _look(self, layer: SampledLayer, query: Tensor) -> None:
        """Keep the chosen request's query: the batch's memory is used again by the next layer."""
        began = self._cpu()
        if self._chosen is None:
            self._chosen = self._choose()
        chosen = self._chosen
        if len(self._looks) < chosen.layers:
            row = query[chosen.query].reshape(-1, self._cache.layout.key.dims)
            self._looks.append(Look(layer.place, row.clone(), float(layer.impl.scale)))
        self._cost += self._cpu() - began

    def _choose(self) -> Chosen:
        """The next request in turn that decodes, and as many layers as there is time for."""
        batch, starts = self._runner.input_batch, self._runner.query_start_loc.np
        rows = [row for row in range(len(batch.req_ids)) if starts[row + 1] - starts[row] == 1]
        self._turn += 1
        row = rows[self._turn % len(rows)]
        tokens = int(batch.num_computed_tokens_cpu[row]) + 1
        most = len(self._layers) if tokens <= _TOKENS else 0
        return Chosen(row, int(starts[row]), tokens, self.budget.layers(tokens, most))

    def _measure(self, logits: Tensor) -> None:
        """Measure, and put what came out beside the step's other words to the scheduler."""
        began, runner = self._cpu(), self._runner
        names = list(runner.input_batch.req_ids)
        chosen = self._chosen or self._choose()
        self._disarm()
        if len(logits) != len(names):
            return  # speculative tokens: there is no one row per request
        rows = _from(chosen.row, len(names))
        # One row at a time: for several, torch wakes its threads, which takes many times as long.
        scores = [float(confidence_score(logits[row : row + 1])[0]) for row in rows]
        samples = [Sample(names[row], score) for row, score in zip(rows, scores, strict=True)]
        if self._looks:
            samples[0] = self._looked(samples[0], chosen)
        runner.kv_connector_output = with_samples(runner.kv_connector_output, samples)
        cost = self._cost + self._cpu() - began
        self.budget.took(cost, len(self._looks), chosen.tokens)

    def _looked(self, sample: Sample, chosen: Chosen) -> Sample:
        size = self._cache.layout.tokens
        table = self._runner.input_batch.block_table[0].get_numpy_array()[chosen.row]
        blocks = torch.from_numpy(table[: -(-chosen.tokens // size)]).to(torch.int64)
        mass = attended(self._cache, self._looks, blocks, chosen.tokens)
        full = chosen.tokens // size
        places, vectors = self._meanings.of(sample.request_id, blocks[:full], mass[:full])
        return Sample(
            sample.request_id, sample.confidence, mass[:full].numpy().tobytes(), places,
            0 if vectors is None else vectors.shape[1],
            b"" if vectors is None else vectors.numpy().tobytes(),
        )  # fmt: skip

    def _guarded(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # the type only: a message may quote what it choked on
            self.detach()
            logger.warning(
                "kvgraph: decode steps are sampled no more after %s",
                type(error).__name__,
                exc_info=logger.isEnabledFor(logging.DEBUG),
            )


def _decodes(scheduler_output: Any) -> bool:
    return 1 in scheduler_output.num_scheduled_tokens.values()


def _from(first: int, count: int) -> list[int]:
    """``first`` and the rows behind it, around the end, ``_ROWS`` at most."""
    return [(first + step) % count for step in range(min(count, _ROWS))]
