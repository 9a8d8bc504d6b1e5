"""vLLM's two model runners as sampling sees them: a step's batch, and where it can be reached."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from .measuring import Sample, with_samples

# Attributes of vLLM's objects that stand before their methods for a while.


class Shadows:
    """Shadows methods of objects, never of classes, and takes all shadows away at once."""

    def __init__(self) -> None:
        self._laid: list[tuple[Any, str]] = []

    def lay(self, owner: Any, name: str, shadow: Callable[..., Any]) -> None:
        """Have ``owner.name(…)`` call ``shadow(original, …)`` from now on."""
        original = getattr(owner, name)
        self._laid.append((owner, name))
        setattr(owner, name, functools.partial(shadow, original))

    def lift(self) -> None:
        """Leave the objects as they were."""
        for owner, name in self._laid:
            vars(owner).pop(name, None)
        self._laid.clear()

    def __len__(self) -> int:
        return len(self._laid)


if TYPE_CHECKING:
    import numpy as np
    from vllm.config.compilation import CUDAGraphMode

    from ....kernels.tensors import Tensor

    Ints = np.ndarray[Any, np.dtype[np.integer[Any]]]


class Batch(NamedTuple):
    """The requests of one step, by row.

    Attributes:
        names: Their ids.
        starts: int [rows + 1], where each one's tokens begin in the batch; then the end.
        computed: int [rows], tokens that were computed before this step.
        table: A row's block numbers: int [most blocks], in host memory or on the GPU.
    """

    names: Sequence[str]
    starts: Ints
    computed: Ints
    table: Callable[[int], Tensor]


class Runner(Protocol):
    """A model runner.

    Attributes:
        model_runner: vLLM's.
        dispatcher: What chooses a step's CUDA graph, by ``dispatch``.
        sampler: An object of vLLM's, and the method of it that is given a step's logits.
        block_size: Tokens of the blocks whose numbers ``Batch.table`` has.
    """

    model_runner: Any
    dispatcher: Any
    sampler: tuple[Any, str]
    block_size: int

    def watch(self, shadows: Shadows) -> None:
        """Have the coming step's batch noted, where the runner does not keep it."""

    def batch(self) -> Batch:
        """The batch of the step that is under way."""

    def without_full_graph(self, dispatch: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What ``dispatch`` would answer if there were no graph with attention inside."""

    def hand(self, samples: list[Sample]) -> None:
        """Put samples beside what the step that is under way says to the scheduler."""


class RunnerV1:
    """``vllm.v1.worker.gpu_model_runner``, which the CPU's is made of."""

    def __init__(self, runner: Any) -> None:
        self.model_runner, self.dispatcher = runner, runner.cudagraph_dispatcher
        self.sampler = runner.sampler, "forward"
        self.block_size = int(runner.input_batch.block_table[0].block_size)

    def watch(self, shadows: Shadows) -> None:
        """Do nothing: the runner keeps its batch."""

    def batch(self) -> Batch:
        """See ``Runner``."""
        batch = self.model_runner.input_batch
        starts = self.model_runner.query_start_loc.np
        numbers = batch.block_table[0].get_numpy_array()
        return Batch(
            list(batch.req_ids), starts, batch.num_computed_tokens_cpu,
            lambda row: torch.from_numpy(numbers[row]),
        )  # fmt: skip

    def without_full_graph(self, dispatch: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """See ``Runner``."""
        refused = {_full(), *(kwargs.pop("invalid_modes", None) or ())}
        return dispatch(*args, **kwargs, invalid_modes=refused)

    def hand(self, samples: list[Sample]) -> None:
        """See ``Runner``."""
        runner = self.model_runner
        runner.kv_connector_output = with_samples(runner.kv_connector_output, samples)


class RunnerV2:
    """``vllm.v1.worker.gpu.model_runner``."""

    def __init__(self, runner: Any) -> None:
        self.model_runner, self.dispatcher = runner, runner.cudagraph_manager
        self.sampler = runner.sampler, "sample"
        self.block_size = int(runner.block_tables.block_sizes[0])
        self._inputs: Any = None

    def watch(self, shadows: Shadows) -> None:
        """See ``Runner``."""
        shadows.lay(self.model_runner, "prepare_inputs", self._note)

    def _note(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._inputs = original(*args, **kwargs)
        return self._inputs

    def batch(self) -> Batch:
        """See ``Runner``."""
        inputs, tables = self._inputs, self.model_runner.block_tables.block_tables[0].gpu
        states = inputs.idx_mapping_np
        return Batch(
            inputs.req_ids, inputs.query_start_loc_np, inputs.num_computed_tokens_np,
            lambda row: tables[int(states[row])],
        )  # fmt: skip

    def without_full_graph(self, dispatch: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """See ``Runner``; graphs of decode steps alone fit only a uniform number of tokens."""
        asked = inspect.signature(dispatch).bind(*args, **kwargs)
        asked.arguments |= {"uniform_token_count": None, "max_query_len": None}
        found = dispatch(*asked.args, **asked.kwargs)
        if found.cg_mode != _full():
            return found
        return replace(
            found, cg_mode=type(found.cg_mode).NONE, num_tokens=asked.arguments["num_tokens"],
            num_reqs=asked.arguments["num_reqs"], uniform_token_count=None, max_query_len=None,
        )  # fmt: skip

    def hand(self, samples: list[Sample]) -> None:
        """See ``Runner``; the runner makes that word at the end of its next ``sample_tokens``."""
        once = Shadows()

        def answer(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            once.lift()
            answered = original(*args, **kwargs)
            if (output := getattr(answered, "model_runner_output", None)) is not None:
                output.kv_connector_output = with_samples(output.kv_connector_output, samples)
            return answered

        once.lay(self.model_runner, "sample_tokens", answer)


def _full() -> CUDAGraphMode:
    from vllm.config.compilation import CUDAGraphMode

    return CUDAGraphMode.FULL
