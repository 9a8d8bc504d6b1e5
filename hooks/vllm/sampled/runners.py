"""Adapts vLLM's two model runners to what sampling needs: the batch, and methods to patch."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from .measuring import Sample, with_samples


class MethodPatches:
    """Patches methods of single objects, never of classes, and undoes all patches at once."""

    def __init__(self) -> None:
        self._patched: list[tuple[Any, str]] = []

    def patch(self, owner: Any, name: str, shadow: Callable[..., Any]) -> None:
        """Make ``owner.name(…)`` call ``shadow(original, …)``."""
        original = getattr(owner, name)
        self._patched.append((owner, name))
        setattr(owner, name, functools.partial(shadow, original))

    def undo(self) -> None:
        for owner, name in self._patched:
            vars(owner).pop(name, None)
        self._patched.clear()

    def __len__(self) -> int:
        return len(self._patched)


if TYPE_CHECKING:
    import numpy as np
    from vllm.config.compilation import CUDAGraphMode

    from ....kernels.tensors import Tensor

    Ints = np.ndarray[Any, np.dtype[np.integer[Any]]]


class Batch(NamedTuple):
    """The requests of one step, by row."""

    names: Sequence[str]  # request ids
    starts: Ints  # int [rows + 1], where each row's tokens begin in the batch; then the end
    computed: Ints  # int [rows], tokens computed before this step
    # maps a row to its block numbers: int [most blocks], in host memory or on the GPU
    table: Callable[[int], Tensor]


class Runner(Protocol):
    """A vLLM model runner, as sampling uses it."""

    model_runner: Any  # vLLM's object
    dispatcher: Any  # object whose `dispatch` chooses a step's CUDA graph
    # vLLM's sampling object, and the name of its method that receives the logits
    sampler: tuple[Any, str]
    block_size: int  # tokens per block of `Batch.table`

    def watch(self, shadows: MethodPatches) -> None:
        """Record the next step's batch, if the runner does not keep it itself."""

    def batch(self) -> Batch:
        """Return the batch of the current step."""

    def without_full_graph(self, dispatch: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return what ``dispatch`` would return if no CUDA graph contained attention."""

    def hand(self, samples: list[Sample]) -> None:
        """Attach samples to the current step's output, which goes to the scheduler."""


class RunnerV1:
    """Adapts ``vllm.v1.worker.gpu_model_runner``, on which the CPU runner is built."""

    def __init__(self, runner: Any) -> None:
        self.model_runner, self.dispatcher = runner, runner.cudagraph_dispatcher
        self.sampler = runner.sampler, "forward"
        self.block_size = int(runner.input_batch.block_table[0].block_size)

    def watch(self, shadows: MethodPatches) -> None:
        pass  # this runner keeps its batch

    def batch(self) -> Batch:
        batch = self.model_runner.input_batch
        starts = self.model_runner.query_start_loc.np
        numbers = batch.block_table[0].get_numpy_array()
        return Batch(
            list(batch.req_ids),
            starts,
            batch.num_computed_tokens_cpu,
            lambda row: torch.from_numpy(numbers[row]),
        )

    def without_full_graph(self, dispatch: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        refused = {_full(), *(kwargs.pop("invalid_modes", None) or ())}
        return dispatch(*args, **kwargs, invalid_modes=refused)

    def hand(self, samples: list[Sample]) -> None:
        runner = self.model_runner
        runner.kv_connector_output = with_samples(runner.kv_connector_output, samples)


class RunnerV2:
    """Adapts ``vllm.v1.worker.gpu.model_runner``."""

    def __init__(self, runner: Any) -> None:
        self.model_runner, self.dispatcher = runner, runner.cudagraph_manager
        self.sampler = runner.sampler, "sample"
        self.block_size = int(runner.block_tables.block_sizes[0])
        self._inputs: Any = None

    def watch(self, shadows: MethodPatches) -> None:
        shadows.patch(self.model_runner, "prepare_inputs", self._note)

    def _note(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._inputs = original(*args, **kwargs)
        return self._inputs

    def batch(self) -> Batch:
        inputs, tables = self._inputs, self.model_runner.block_tables.block_tables[0].gpu
        states = inputs.idx_mapping_np
        return Batch(
            inputs.req_ids,
            inputs.query_start_loc_np,
            inputs.num_computed_tokens_np,
            lambda row: tables[int(states[row])],
        )

    def without_full_graph(self, dispatch: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # Graphs of decode steps only fit a uniform number of tokens, so none is asked for.
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
        # This runner builds its output at the end of its next ``sample_tokens``.
        once = MethodPatches()

        def answer(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            once.undo()
            answered = original(*args, **kwargs)
            if (output := getattr(answered, "model_runner_output", None)) is not None:
                output.kv_connector_output = with_samples(output.kv_connector_output, samples)
            return answered

        once.patch(self.model_runner, "sample_tokens", answer)


def _full() -> CUDAGraphMode:
    from vllm.config.compilation import CUDAGraphMode

    return CUDAGraphMode.FULL
