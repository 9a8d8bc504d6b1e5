"""Model runners without a model, around vLLM's own dispatchers of CUDA graphs. As on a GPU,
attention is called from Python only where the step's graph leaves it outside.
"""

from __future__ import annotations

import copy
import dataclasses
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from kvgraph.kernels.layout import PagedKv

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


def new_graph_manager(config: Any) -> Any:
    """vLLM's own, as its runner V2 has it once its graphs are captured."""
    from vllm.v1.worker.gpu import cudagraph_utils

    alone = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    no_gpu = SimpleNamespace(get_global_graph_pool=lambda: None)
    with (
        mock.patch.object(cudagraph_utils, "get_pp_group", return_value=alone),
        mock.patch.object(cudagraph_utils, "current_platform", no_gpu),
    ):
        mode = config.compilation_config.cudagraph_mode
        manager = cudagraph_utils.CudaGraphManager(config, torch.device("cpu"), mode, 1)
    manager._graphs_captured = True
    return manager


class Chooser:
    """vLLM's samplers, as far as they are given logits."""

    def forward(self, logits: Any) -> Any:
        return logits.argmax(-1)

    def sample(self, logits: Any) -> Any:
        return logits.argmax(-1)


class Steps:
    """What both runners do alike: the graph of each step, and what it told the scheduler beside its
    tokens.
    """

    def __init__(self, config: Any, cache: PagedKv, heads: int, computed: int) -> None:
        self.vllm_config, self.sampler = config, Chooser()
        self.attention = [Attention(cache.layout.key.dims) for _ in range(cache.layout.layers)]
        self.modes: list[str] = []
        self.said: list[Any] = []
        self.computed, self.layout, self._heads = computed, cache.layout, heads

    def forward(self, mode: str, tokens: int) -> None:
        self.modes.append(mode)
        if mode != "FULL":
            for impl in self.attention:
                impl.forward(None, torch.randn(tokens, self._heads, impl.head_size))


class MadeRunnerV1(Steps):
    """Steps as ``vllm.v1.worker.gpu_model_runner`` makes them."""

    def __init__(self, config: Any, cache: PagedKv, heads: int, computed: int) -> None:
        super().__init__(config, cache, heads, computed)
        self.cudagraph_dispatcher, self.kv_connector_output = new_dispatcher(config), None
        table = np.arange(cache.layout.blocks, dtype=np.int32)[None].repeat(16, 0)
        self._table = SimpleNamespace(get_numpy_array=lambda: table, block_size=cache.layout.tokens)
        self.input_batch: Any = SimpleNamespace(block_table=[self._table])
        self.query_start_loc: Any = None

    def execute_model(self, output: Any) -> None:
        names, tokens = list(output.num_scheduled_tokens), output.num_scheduled_tokens
        computed = np.full(len(names), self.computed)
        self.input_batch = SimpleNamespace(
            req_ids=names, num_computed_tokens_cpu=computed, block_table=[self._table]
        )
        self.query_start_loc = SimpleNamespace(np=np.cumsum([0, *tokens.values()]))
        total = output.total_num_scheduled_tokens
        mode, _ = self.cudagraph_dispatcher.dispatch(
            num_tokens=total, uniform_decode=total == len(names), has_lora=False,
            num_active_loras=0, valid_modes=None, invalid_modes=None,
        )  # fmt: skip
        self.forward(mode.name, total)

    def step(self, output: Any) -> None:
        self.execute_model(output)
        self.sampler.forward(torch.randn(len(self.input_batch.req_ids), 500))
        self.said.append(self.kv_connector_output)
        self.kv_connector_output = None


class MadeRunnerV2(Steps):
    """Steps as ``vllm.v1.worker.gpu.model_runner`` makes them, of one token per request."""

    def __init__(self, config: Any, cache: PagedKv, heads: int, computed: int) -> None:
        from vllm.v1.worker.gpu.input_batch import InputBuffers

        super().__init__(config, cache, heads, computed)
        self.cudagraph_manager = new_graph_manager(config)
        table = torch.arange(cache.layout.blocks, dtype=torch.int32)[None].repeat(16, 1)
        self.block_tables = SimpleNamespace(
            block_tables=[SimpleNamespace(gpu=table)], block_sizes=[cache.layout.tokens]
        )
        self._buffers = InputBuffers(16, 64, torch.device("cpu"))
        self._names: list[str] = []

    def prepare_inputs(self, output: Any) -> Any:
        from vllm.v1.worker.gpu.input_batch import InputBatch

        names = list(output.num_scheduled_tokens)
        made = InputBatch.make_dummy(len(names), len(names), self._buffers)
        computed = np.full(len(names), self.computed, dtype=np.int32)
        return dataclasses.replace(made, req_ids=names, num_computed_tokens_np=computed)

    def execute_model(self, output: Any) -> None:
        self._names = list(output.num_scheduled_tokens)
        count, total = len(self._names), output.total_num_scheduled_tokens
        found = self.cudagraph_manager.dispatch(
            count, total, 1 if total == count else None, num_active_loras=0, max_query_len=1
        )
        if total == count:
            self.prepare_inputs(output)
        self.forward(found.cg_mode.name, total)

    def sample_tokens(self, grammar_output: Any) -> Any:
        from vllm.v1.outputs import ModelRunnerOutput

        self.sampler.sample(torch.randn(len(self._names), 500))
        return SimpleNamespace(model_runner_output=ModelRunnerOutput(self._names, {}))

    def step(self, output: Any) -> None:
        self.execute_model(output)
        answer = self.sample_tokens(None)
        self.said.append(answer.model_runner_output.kv_connector_output)
