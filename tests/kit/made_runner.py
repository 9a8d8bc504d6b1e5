"""A model runner without a model, around vLLM's own dispatcher of CUDA graphs.

As on a GPU, attention is called from Python only where the step's graph leaves it outside.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from kvgraph.kernels.layout.layout import PagedKv

SIZES = (1, 2, 4, 8)  # that graphs are captured for


def graph_config(config: Any, mode: str) -> Any:
    """vLLM's configuration of an engine whose CUDA graphs are of a mode."""
    from vllm.config.compilation import CompilationConfig, CompilationMode, CUDAGraphMode

    compilation = CompilationConfig(
        mode=CompilationMode.VLLM_COMPILE, cudagraph_mode=CUDAGraphMode[mode],
        cudagraph_capture_sizes=list(SIZES), max_cudagraph_capture_size=SIZES[-1],
    )  # fmt: skip
    compilation.set_splitting_ops_for_v1("naive")
    made = copy.copy(config)
    made.compilation_config = compilation
    made.scheduler_config = copy.copy(config.scheduler_config)
    made.scheduler_config.max_num_seqs = 16
    return made


def new_dispatcher(config: Any) -> Any:
    """vLLM's own, as its runner V1 sets it up."""
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

    dispatcher = CudagraphDispatcher(config)
    dispatcher.initialize_cudagraph_keys(config.compilation_config.cudagraph_mode, 1)
    return dispatcher


def scheduled(tokens: dict[str, int], new: bool = False) -> Any:
    """vLLM's word for a step that computes so many tokens of requests."""
    from vllm.v1.core.sched.output import SchedulerOutput

    output = SchedulerOutput.make_empty()
    output.num_scheduled_tokens = tokens
    output.total_num_scheduled_tokens = sum(tokens.values())
    output.scheduled_new_reqs = [SimpleNamespace()] if new else []
    return output


class Attention:
    """A layer's attention: counts how often it was called."""

    def __init__(self, dims: int) -> None:
        self.head_size, self.scale, self.calls = dims, dims**-0.5, 0

    def forward(self, owner: Any, query: Any) -> Any:
        self.calls += 1
        return query


class Chooser:
    """vLLM's sampler, as far as it is given logits."""

    def forward(self, logits: Any) -> Any:
        return logits.argmax(-1)


class MadeRunner:
    """Steps as ``vllm.v1.worker.gpu_model_runner`` makes them.

    Attributes:
        modes: The graph of each step.
        said: What each step told the scheduler beside its tokens.
    """

    def __init__(self, config: Any, cache: PagedKv, heads: int, computed: int) -> None:
        self.vllm_config, self.cudagraph_dispatcher = config, new_dispatcher(config)
        self.sampler, self.kv_connector_output = Chooser(), None
        self.attention = [Attention(cache.layout.key.dims) for _ in range(cache.layout.layers)]
        self.modes: list[str] = []
        self.said: list[Any] = []
        self._heads, self._computed = heads, computed
        table = np.arange(cache.layout.blocks, dtype=np.int32)[None].repeat(16, 0)
        self._table = SimpleNamespace(get_numpy_array=lambda: table, block_size=cache.layout.tokens)
        self.input_batch: Any = SimpleNamespace(block_table=[self._table])
        self.query_start_loc: Any = None

    def execute_model(self, output: Any) -> None:
        names, tokens = list(output.num_scheduled_tokens), output.num_scheduled_tokens
        computed = np.full(len(names), self._computed)
        self.input_batch = SimpleNamespace(
            req_ids=names, num_computed_tokens_cpu=computed, block_table=[self._table]
        )
        starts = np.cumsum([0, *tokens.values()])
        self.query_start_loc = SimpleNamespace(np=starts)
        total = output.total_num_scheduled_tokens
        mode, _ = self.cudagraph_dispatcher.dispatch(
            num_tokens=total, uniform_decode=total == len(names), has_lora=False,
            num_active_loras=0, valid_modes=None, invalid_modes=None,
        )  # fmt: skip
        self.modes.append(mode.name)
        if mode.name != "FULL":
            for impl in self.attention:
                impl.forward(None, torch.randn(total, self._heads, impl.head_size))

    def sample_tokens(self) -> Any:
        names = self.input_batch.req_ids
        tokens = self.sampler.forward(torch.randn(len(names), 500))
        self.said.append(self.kv_connector_output)
        self.kv_connector_output = None
        return tokens

    def step(self, output: Any) -> None:
        self.execute_model(output)
        self.sample_tokens()
