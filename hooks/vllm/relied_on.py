"""Everything of vLLM that the hooks rely on, so that an unsuitable version is reported in plain
words.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Final, NamedTuple

# A name in vLLM that the hooks need, what a given vLLM has under it, and whether the two fit.

Shape = tuple[str, ...] | None
"""What is found under a name: None for nothing, ``VALUE`` for a value, else a callable's
parameters.

A parameter with a default ends in ``=``; ``*args`` and ``**kwargs`` are spelled so.
"""
VALUE: Final[Shape] = (".",)


class Part(Enum):
    """The feature that cannot work without a name."""

    ALL = "everything"
    TIERS = "tiers"
    ADMISSION = "admission"
    SAMPLING = "sampling decode steps"
    ENDS = "reading why answers end"
    WAKING = "waking an idle engine for prefetches"


class Use(Enum):
    """How the hooks use a name."""

    READ = "read"
    NAMED = "named"  # only has to exist
    CALLED = "called"  # has these parameters: we call it, or read them from vLLM's calls
    OVERRIDDEN = "overridden"  # vLLM calls our version instead, with these parameters


class Need(NamedTuple):
    """One row of the table."""

    module: str  # module to import it from
    path: str  # its name in the module, with the names of enclosing classes
    use: Use
    # the parameters that we know; for a callable, at least all required ones
    parameters: tuple[str, ...] = ()
    part: Part = Part.ALL

    @property
    def name(self) -> str:
        """Module and path together, as in ``module.Class.method``."""
        return f"{self.module}.{self.path}"


def misfits(needs: tuple[Need, ...], shape_of: Callable[[Need], Shape]) -> list[str]:
    """Return one sentence for each need that a vLLM does not meet."""
    return [problem for need in needs if (problem := misfit(need, shape_of(need)))]


def misfit(need: Need, shape: Shape) -> str | None:
    """Return why a vLLM with ``shape`` under this name does not fit; None if it does."""
    if shape is None:
        return f"{need.name} is missing"
    if need.use is Use.NAMED:
        return None
    if (shape == VALUE) is not (need.use is Use.READ):
        return f"{need.name} is {'a' if need.use is Use.READ else 'no'} method"
    return None if need.use is Use.READ else _misfit_of_call(need, shape)


def _misfit_of_call(need: Need, shape: tuple[str, ...]) -> str | None:
    known, names = need.parameters, [each.rstrip("=").lstrip("*") for each in shape]
    if lost := [name for name in known if name not in names]:
        return f"{need.name} takes no {', '.join(lost)}"
    if [name for name in names if name in known] != list(known):
        return f"{need.name} takes {', '.join(known)} in another order"
    new = [each for each in shape if each.rstrip("=") not in known and not each.startswith("*")]
    if need.use is Use.CALLED:
        new = [each for each in new if not each.endswith("=")]
    return f"{need.name} wants {', '.join(each.rstrip('=') for each in new)}" if new else None


_V1: Final = "vllm.v1"
_CORE: Final = "vllm.v1.core"
_KV: Final = "vllm.distributed.kv_transfer.kv_connector"


def _called(module: str, methods: Mapping[str, str], part: Part = Part.ALL) -> Iterator[Need]:
    """Rows of methods, by path: the parameters that we pass, or that we read when vLLM calls."""
    for path, parameters in methods.items():
        yield Need(module, path, Use.CALLED, tuple(parameters.split()), part)


def _overridden(module: str, methods: Mapping[str, str], part: Part = Part.ALL) -> Iterator[Need]:
    for path, parameters in methods.items():
        yield Need(module, path, Use.OVERRIDDEN, tuple(parameters.split()), part)


def _read(module: str, owner: str, names: str, part: Part = Part.ALL) -> Iterator[Need]:
    for name in names.split():
        yield Need(module, f"{owner}.{name}", Use.READ, (), part)


def _named(module: str, paths: str, part: Part = Part.ALL) -> Iterator[Need]:
    for path in paths.split():
        yield Need(module, path, Use.NAMED, (), part)


_STARTING: Final = (  # plugin, shapes, patches, doctor
    *_named("vllm.engine.arg_utils", "EngineArgs.create_engine_config EngineArgs.add_cli_args"),
    *_named("vllm.engine.arg_utils", "EngineArgs.from_cli_args"),
    *_named("vllm.utils.argparse_utils", "FlexibleArgumentParser"),
    *_named("vllm.config", "VllmConfig ModelConfig"),
    *_read("vllm.config", "VllmConfig", "cache_config kv_transfer_config model_config"),
    *_read("vllm.config", "VllmConfig", "parallel_config scheduler_config"),
    *_read("vllm.config", "KVTransferConfig", "kv_connector kv_connector_module_path kv_role"),
    *_read("vllm.config", "KVTransferConfig", "kv_load_failure_policy kv_connector_extra_config"),
    *_read("vllm.config", "KVTransferConfig", "is_kv_transfer_instance"),
    *_called("vllm.config", {"KVTransferConfig.has_connector": "connector_name"}),
    *_called("vllm.config", {"KVTransferConfig.get_from_extra_config": "key default"}),
    *_read("vllm.config", "CacheConfig", "enable_prefix_caching"),
    *_read("vllm.config", "ModelConfig", "is_attention_free is_encoder_decoder is_hybrid model"),
    *_read("vllm.config", "ModelConfig", "enable_sleep_mode served_model_name architectures"),
    *_read("vllm.config", "VllmConfig", "additional_config"),
    *_read("vllm.config", "ParallelConfig", "distributed_executor_backend local_world_size"),
    *_read("vllm.config", "ParallelConfig", "data_parallel_size_local world_size"),
    *_read("vllm.config", "ParallelConfig", "decode_context_parallel_size"),
    *_read("vllm.config", "ParallelConfig", "prefill_context_parallel_size"),
    *_read("vllm.config", "SchedulerConfig", "max_num_batched_tokens max_num_seqs"),
    *_named("vllm.platforms", "current_platform"),
    *_named("vllm.platforms", "CpuArchEnum.X86 CpuArchEnum.ARM CpuArchEnum.RISCV"),
    *_called("vllm.platforms", {"Platform.is_cpu": "", "Platform.get_cpu_architecture": ""}),
    *_named("vllm.envs", "VLLM_ENABLE_V1_MULTIPROCESSING"),
    *_named("vllm.envs", "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"),
    *_called("vllm.v1.executor.abstract", {"Executor.init_kv_output_aggregator": "connector"}),
    *_named(f"{_KV}.factory", "KVConnectorFactory.create_connector"),
)
_CONNECTOR: Final = (  # what vLLM's scheduler calls, and what it hands over
    *_named(f"{_KV}.v1.base", "KVConnectorMetadata SupportsHMA KVConnectorRole.SCHEDULER"),
    *_called(f"{_KV}.v1.base", {"KVConnectorBase_V1.__init__": "vllm_config role kv_cache_config"}),
    *_read(f"{_KV}.v1.base", "KVConnectorBase_V1", "role requires_kv_delivery"),
    *_read(f"{_KV}.v1.base", "KVConnectorBase_V1", "_vllm_config _kv_cache_config"),
    *_read(f"{_KV}.v1.base", "KVConnectorBase_V1", "_kv_transfer_config _kv_cache_manager"),
    *_read(f"{_KV}.v1.base", "KVConnectorBase_V1", "_connector_metadata"),
    *_overridden(
        f"{_KV}.v1.base",
        {
            "KVConnectorBase_V1.bind_kv_cache_manager": "kv_cache_manager",
            "KVConnectorBase_V1.bind_gpu_block_pool": "gpu_block_pool",
            "KVConnectorBase_V1.on_new_request": "request",
            "KVConnectorBase_V1.get_num_new_matched_tokens": "request num_computed_tokens",
            "KVConnectorBase_V1.update_state_after_alloc": "request blocks num_external_tokens",
            "KVConnectorBase_V1.build_connector_meta": "scheduler_output",
            "KVConnectorBase_V1.update_connector_output": "connector_output",
            "KVConnectorBase_V1.request_finished": "request block_ids",
            "SupportsHMA.request_finished_all_groups": "request block_ids",
            "KVConnectorBase_V1.has_pending_push_work": "",
            "KVConnectorBase_V1.reset_cache": "",
            "KVConnectorBase_V1.shutdown": "",
        },
    ),
    *_read(f"{_CORE}.sched.output", "SchedulerOutput", "total_num_scheduled_tokens"),
    *_read(f"{_CORE}.sched.output", "SchedulerOutput", "preempted_req_ids"),
    *_read(f"{_V1}.outputs", "KVConnectorOutput", "finished_recving kv_connector_worker_meta"),
    *_called(f"{_CORE}.kv_cache_manager", {"KVCacheBlocks.get_block_ids": ""}),
    *_read(f"{_V1}.kv_cache_interface", "KVCacheConfig", "kv_cache_groups"),
    *_read(f"{_V1}.kv_cache_interface", "KVCacheGroupSpec", "kv_cache_spec layer_names"),
    *_read(f"{_V1}.kv_cache_interface", "FullAttentionSpec", "block_size page_size_bytes"),
    *_read(f"{_V1}.kv_cache_interface", "UniformTypeKVCacheSpecs", "kv_cache_specs"),
    *_read(f"{_V1}.request", "Request", "request_id status block_hashes num_tokens"),
    *_read(f"{_V1}.request", "Request", "num_prompt_tokens num_computed_tokens cache_salt"),
    *_read(f"{_V1}.request", "Request", "kv_transfer_params session_id lora_request"),
    *_read(f"{_V1}.request", "Request", "resumable prompt_token_ids max_tokens arrival_time"),
)
_POOL: Final = (  # observe, free_queue
    *_read(f"{_CORE}.block_pool", "BlockPool", "blocks num_gpu_blocks hash_block_size"),
    *_read(f"{_CORE}.block_pool", "BlockPool", "enable_caching free_block_queue"),
    *_read(f"{_CORE}.block_pool", "BlockPool", "cached_block_hash_to_block"),
    *_called(
        f"{_CORE}.block_pool",
        {
            "BlockPool.cache_full_blocks": "request blocks num_cached_blocks num_full_blocks "
            "block_size kv_cache_group_id",
            "BlockPool._emit_block_removed_events": "block_hashes",
            "BlockPool.reset_prefix_cache": "",
            "BlockPool.free_blocks": "ordered_blocks",
            "BlockPool.get_num_free_blocks": "",
            "BlockPool.touch": "blocks",
            "BlockHashToBlockMap.get_one_block": "key",
            "BlockHashToBlockMap.__len__": "",
        },
    ),
    *_read(f"{_CORE}.kv_cache_utils", "KVCacheBlock", "block_id ref_cnt block_hash is_null"),
    *_read(f"{_CORE}.kv_cache_utils", "KVCacheBlock", "prev_free_block next_free_block"),
    *_read(f"{_CORE}.kv_cache_utils", "FreeKVCacheBlockQueue", "fake_free_list_head"),
    *_read(f"{_CORE}.kv_cache_utils", "FreeKVCacheBlockQueue", "fake_free_list_tail"),
    *_called(
        f"{_CORE}.kv_cache_utils",
        {
            "FreeKVCacheBlockQueue.popleft_n": "n",
            "FreeKVCacheBlockQueue.remove": "block",
            "FreeKVCacheBlockQueue.prepend_n": "blocks",
            "FreeKVCacheBlockQueue.append_n": "blocks",
            "FreeKVCacheBlockQueue.iter_blocks_after": "cursor",
        },
    ),
)
_ADMISSION: Final = (  # holding, patches
    *_named(f"{_CORE}.sched.scheduler", "Scheduler.__init__", Part.ADMISSION),
    *_read(f"{_CORE}.sched.scheduler", "Scheduler", "connector waiting running", Part.ADMISSION),
    *_read(f"{_CORE}.sched.scheduler", "Scheduler", "kv_holding_waiting requests", Part.ADMISSION),
    *_read(
        f"{_CORE}.sched.scheduler",
        "Scheduler",
        "deferred_waiting num_waiting_for_streaming_input",
        Part.ADMISSION,
    ),
    *_called(
        f"{_CORE}.sched.scheduler",
        {"Scheduler.add_request": "request", "Scheduler._enqueue_waiting_request": "request"},
        Part.ADMISSION,
    ),
    *_overridden(
        f"{_CORE}.sched.request_queue",
        {
            "RequestQueue.add_request": "request",
            "RequestQueue.prepend_request": "request",
            "RequestQueue.prepend_requests": "requests",
            "RequestQueue.remove_request": "request",
            "RequestQueue.remove_requests": "requests",
            "RequestQueue.peek_request": "",
            "RequestQueue.pop_request": "",
            "RequestQueue.__bool__": "",
            "RequestQueue.__len__": "",
            "RequestQueue.__iter__": "",
        },
        Part.ADMISSION,
    ),
    *_read(f"{_V1}.request", "Request", "num_preemptions priority", Part.ADMISSION),
    *_called(f"{_V1}.request", {"Request.is_finished": ""}, Part.ADMISSION),
)
_TIERS: Final = (  # tiers
    *_called(
        f"{_CORE}.block_pool",
        {
            "BlockPool.get_new_blocks": "num_blocks",
            "BlockPool._insert_block_hash": "block_hash_with_group_id block num_tokens",
        },
        Part.TIERS,
    ),
    *_read(f"{_CORE}.kv_cache_manager", "KVCacheManager", "coordinator", Part.TIERS),
    *_called(f"{_CORE}.kv_cache_manager", {"KVCacheManager.free": "request"}, Part.TIERS),
    *_read(f"{_CORE}.kv_cache_manager", "KVCacheBlocks", "blocks", Part.TIERS),
    *_read(
        f"{_CORE}.kv_cache_coordinator", "KVCacheCoordinator", "single_type_managers", Part.TIERS
    ),
    *_read(
        f"{_CORE}.single_type_kv_cache_manager",
        "SingleTypeKVCacheManager",
        "req_to_blocks",
        Part.TIERS,
    ),
    *_overridden(
        f"{_KV}.v1.base",
        {
            "KVConnectorBase_V1.get_required_kvcache_layout": "vllm_config",
            "KVConnectorBase_V1.register_kv_caches": "kv_caches",
            "KVConnectorBase_V1.start_load_kv": "forward_context",
            "KVConnectorBase_V1.get_finished": "finished_req_ids",
            "KVConnectorBase_V1.get_block_ids_with_load_errors": "",
            "KVConnectorBase_V1.build_connector_worker_meta": "",
            "KVConnectorBase_V1.wait_for_layer_load": "layer_name",
            "KVConnectorBase_V1.save_kv_layer": "layer_name kv_layer attn_metadata",
            "KVConnectorBase_V1.wait_for_save": "",
            "KVConnectorWorkerMetadata.aggregate": "other",
        },
        Part.TIERS,
    ),
    *_read("vllm.config", "SchedulerConfig", "policy", Part.TIERS),
    *_read(f"{_V1}.request", "Request", "skip_reading_prefix_cache", Part.TIERS),
    *_named(f"{_KV}.v1.base", "KVConnectorRole.WORKER", Part.TIERS),
    *_called("vllm.utils.hashing", {"get_hash_fn_by_name": "hash_fn_name"}, Part.TIERS),
    *_called(
        f"{_CORE}.kv_cache_utils",
        {"hash_block_tokens": "hash_function parent_block_hash curr_block_token_ids"},
        Part.TIERS,
    ),
    *_named(f"{_V1}.kv_cache_layout", "KVCacheLayout.BLHNC", Part.TIERS),
    *_read("vllm.config", "CacheConfig", "cache_dtype prefix_caching_hash_algo", Part.TIERS),
    *_read("vllm.config", "CacheConfig", "block_size user_specified_block_size", Part.TIERS),
    *_read("vllm.config", "CacheConfig", "kv_cache_dtype_skip_layers", Part.TIERS),
    *_read("vllm.config", "ModelConfig", "hf_config use_mla", Part.TIERS),
    *_called("vllm.config.utils", {"normalize_value": "x"}, Part.TIERS),
    *_named("vllm.envs", "environment_variables", Part.TIERS),
    *_read("vllm.config", "VllmConfig", "load_config weight_transfer_config", Part.TIERS),
    *_read("vllm.config", "LoadConfig", "load_format", Part.TIERS),
    *_read("vllm.config", "ParallelConfig", "data_parallel_index rank", Part.TIERS),
    *_read("vllm.config", "ParallelConfig", "pipeline_parallel_size", Part.TIERS),
    *_read("vllm.config", "ParallelConfig", "tensor_parallel_size", Part.TIERS),
    *_read("vllm.config", "VllmConfig", "speculative_config", Part.TIERS),
    *_read("vllm.config", "SpeculativeConfig", "draft_model_config draft_load_config", Part.TIERS),
)
_ENDS: Final = (  # api, ends
    *_named("vllm.renderers", "ChatParams", Part.ENDS),
    *_called("vllm.renderers", {"renderer_from_config": "config"}, Part.ENDS),
    *_called(
        "vllm.renderers.base",
        {
            "BaseRenderer.render_messages": "messages params",
            "BaseRenderer.get_tokenizer": "",
            "BaseRenderer.shutdown": "",
        },
        Part.ENDS,
    ),
    *_called("vllm.tokenizers", {"cached_tokenizer_from_config": "model_config"}, Part.ENDS),
    *_read("vllm.config", "ModelConfig", "multimodal_config", Part.ENDS),
    *_read(f"{_V1}.request", "Request", "output_token_ids structured_output_request", Part.ENDS),
    *_read(f"{_V1}.structured_output.request", "StructuredOutputRequest", "params", Part.ENDS),
    *_read("vllm.sampling_params", "StructuredOutputsParams", "structural_tag", Part.ENDS),
)
_SAMPLING: Final = (  # sampled
    *_called(
        "vllm.v1.worker.gpu_model_runner",
        {
            "GPUModelRunner.execute_model": "scheduler_output",
            "GPUModelRunner.initialize_kv_cache": "kv_cache_config is_profiling",
        },
        Part.SAMPLING,
    ),
    *_called(
        f"{_V1}.sample.sampler", {"Sampler.forward": "logits sampling_metadata"}, Part.SAMPLING
    ),
    *_read(f"{_CORE}.sched.output", "SchedulerOutput", "num_scheduled_tokens", Part.SAMPLING),
    *_read(f"{_CORE}.sched.output", "SchedulerOutput", "scheduled_new_reqs", Part.SAMPLING),
    *_called(f"{_V1}.worker.block_table", {"BlockTable.get_numpy_array": ""}, Part.SAMPLING),
    *_read(f"{_V1}.worker.block_table", "BlockTable", "block_size", Part.SAMPLING),
    *_named("vllm.config.compilation", "CUDAGraphMode.FULL CUDAGraphMode.NONE", Part.SAMPLING),
    *_called(
        f"{_V1}.cudagraph_dispatcher",
        {"CudagraphDispatcher.dispatch": "num_tokens invalid_modes"},
        Part.SAMPLING,
    ),
    *_called(
        f"{_V1}.worker.gpu.model_runner",
        {
            "GPUModelRunner.execute_model": "scheduler_output",
            "GPUModelRunner.initialize_kv_cache": "kv_cache_config is_profiling",
            "GPUModelRunner.sample_tokens": "grammar_output",
        },
        Part.SAMPLING,
    ),
    *_named(f"{_V1}.worker.gpu.model_runner", "GPUModelRunner.prepare_inputs", Part.SAMPLING),
    *_read(
        f"{_V1}.worker.gpu.model_runner",
        "GPUModelRunner",
        "cudagraph_manager sampler",
        Part.SAMPLING,
    ),
    *_read(
        f"{_V1}.worker.gpu.block_table", "BlockTables", "block_tables block_sizes", Part.SAMPLING
    ),
    *_named(f"{_V1}.worker.gpu.sample.sampler", "Sampler.sample", Part.SAMPLING),
    *_called(
        f"{_V1}.worker.gpu.cudagraph_utils",
        {
            "CudaGraphManager.dispatch": "num_reqs num_tokens uniform_token_count num_active_loras "
            "max_query_len"
        },
        Part.SAMPLING,
    ),
    *_read(
        f"{_V1}.worker.gpu.input_batch",
        "InputBatch",
        "req_ids idx_mapping_np query_start_loc_np num_computed_tokens_np",
        Part.SAMPLING,
    ),
)
_WAKING: Final = (  # idle
    *_called(
        f"{_V1}.engine.core",
        {
            "EngineCoreProc.run_busy_loop": "",
            "DPEngineCoreProc.run_busy_loop": "",
            "EngineCoreProc.is_scheduler_paused": "",
        },
        Part.WAKING,
    ),
    *_read(f"{_V1}.engine.core", "EngineCoreProc", "input_queue", Part.WAKING),
    *_read(f"{_V1}.engine.core", "EngineCore", "scheduler vllm_config", Part.WAKING),
    *_named(f"{_V1}.engine", "EngineCoreRequestType.WAKEUP", Part.WAKING),
    *_read("vllm.config", "ParallelConfig", "data_parallel_size", Part.WAKING),
)
RELIED_ON: Final[tuple[Need, ...]] = (
    *_STARTING, *_CONNECTOR, *_POOL, *_ADMISSION, *_TIERS, *_ENDS, *_SAMPLING, *_WAKING
)  # fmt: skip


# Places where vLLM reads the configuration that we set, and may then behave differently from stock.
#
# Names and parameters may fit in a release that still acts differently wherever there is a
# ``kv_transfer_config``. So each place that reads it was reviewed, in the compared releases, and a
# new place is reported before it affects an engine.

SET: Final = "kv_transfer_config"
"""The one value of vLLM's configuration that we set. Its connector is ours and has no role unless
there are tiers, so only code that asks whether the value is set at all behaves differently.
"""
_NOT_LOOKED_AT: Final = "distributed/kv_transfer/"  # the connectors themselves

KNOWN: Final = frozenset(
    {
        "config/kv_transfer.py:hisparse_host_pool_gib",
        "config/vllm.py:VllmConfig",
        "config/vllm.py:VllmConfig.__post_init__",
        "config/vllm.py:VllmConfig._post_init_kv_transfer_config",
        "config/vllm.py:VllmConfig._resolve_mm_embedding_inputs",
        "config/vllm.py:VllmConfig._verify_aux_output_compatibility",
        "config/vllm.py:VllmConfig._verify_kv_transfer_compat",
        "config/vllm.py:VllmConfig.adjust_dcp_kv_cache_interleave_size",
        "config/vllm.py:VllmConfig.compute_hash",
        "config/vllm.py:VllmConfig.num_hash_lookahead_tokens",
        "config/vllm.py:VllmConfig.validate_block_size",
        "config/vllm.py:VllmConfig.validate_mamba_cached_kernel",
        "engine/arg_utils.py:EngineArgs",
        "engine/arg_utils.py:EngineArgs.add_cli_args",
        "engine/arg_utils.py:EngineArgs.create_engine_config",
        "entrypoints/generate/base/serving.py:GenerateBaseServing.__init__",
        "entrypoints/llm.py:LLM.__init__",
        "models/deepseek_v4/amd/rocm.py:DeepseekV4ROCMAiterMLAAttention.__init__",
        "models/deepseek_v4/amd/rocm.py:DeepseekV4ROCMAiterSparseSWAMetadataBuilder.__init__",
        "models/deepseek_v41/amd/rocm.py:DeepseekV41ROCMAiterMLAAttention.__init__",
        "models/deepseek_v41/amd/rocm.py:DeepseekV41ROCMAiterSparseSWAMetadataBuilder.__init__",
        "models/deepseek_v41/amd/rocm.py:DeepseekV4ROCMAiterSparseSWAMetadataBuilder.__init__",
        "models/deepseek_v41/nvidia/model.py:DeepseekV4Model.__init__",
        "models/deepseek_v41/nvidia/specialized_decode/__init__.py:unsupported",
        "models/kimi_k3/amd/specialized_decode/runtime/__init__.py:unsupported",
        "models/minimax_m3/amd/specialized_decode/runtime/spec.py:DecodeConfig.refusal_reasons",
        "models/step5/nvidia/model.py:_verify_step5_dsa_kv_transfer_compatibility",
        "platforms/cpu.py:CpuPlatform.check_and_update_config",
        "platforms/xpu.py:XPUPlatform.check_and_update_config",
        "utils/ompmultiprocessing.py:OMPProcessManager.__init__",
        "v1/attention/backends/rocm_aiter_unified_attn.py:_kv_connector_enabled",
        "v1/attention/selector.py:get_attn_backend",
        "v1/core/kv_cache_utils.py:resolve_kv_cache_block_sizes",
        "v1/core/sched/scheduler.py:Scheduler.__init__",
        "v1/core/sched/scheduler.py:Scheduler._connector_finished",
        "v1/engine/core.py:EngineCore._initialize_kv_caches",
        "v1/engine/core.py:EngineCoreProc.run_engine_core",
        "v1/engine/utils.py:_apply_dp_identity_suffix",
        "v1/executor/ray_executor.py:RayDistributedExecutor._init_executor",
        "v1/hisparse/layout.py:get_hisparse_host_pool_bytes",
        "v1/metrics/loggers.py:LoggingStatLogger.__init__",
        "v1/metrics/loggers.py:PrometheusStatLogger.__init__",
        "v1/utils.py:report_usage_stats",
        "v1/worker/worker_base.py:WorkerBase.__init__",
    }
)
"""Places that read ``SET`` in the compared releases. If one makes vLLM differ from stock, it is
declined before the start (``shapes.reason_to_decline``), corrected (``plugin.keep_cpu_threads``),
or described in docs/engines.md.
"""


def unknown_places(package: Path) -> list[str]:
    """Return the functions in vLLM's sources that read ``SET`` and were not reviewed, sorted. Code
    can test the value under any name, so a function counts if it mentions it at all.
    """
    return sorted(set(_places(package)) - KNOWN)


def _places(package: Path) -> Iterator[str]:
    for path in package.rglob("*.py"):
        name = path.relative_to(package).as_posix()
        if name.startswith(_NOT_LOOKED_AT):
            continue
        source = path.read_text("utf-8", "replace")
        if SET not in source:
            continue
        try:
            tree = ast.parse(source)
        except SyntaxError:
            yield f"{name}:?"
            continue
        for owner in _readers(tree, ()):
            yield f"{name}:{'.'.join(owner)}"


def _readers(node: ast.AST, inside: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The functions and classes, with those around them, in which the value is mentioned."""
    for child in ast.iter_child_nodes(node):
        named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        owner = (*inside, child.name) if named else inside  # type: ignore[attr-defined]
        if SET in (getattr(child, "attr", ""), getattr(child, "id", ""), _constant(child)):
            yield owner
        yield from _readers(child, owner)


def _constant(node: ast.AST) -> object:
    """A string, as in ``getattr(config, "…")``; None for all else."""
    value = node.value if isinstance(node, ast.Constant) else None
    return value if isinstance(value, str) else None
