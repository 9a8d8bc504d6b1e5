"""All of vLLM that the hooks rely on, so that a version that does not fit is told in words."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
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


# What we need, by the part that cannot work without it, and by vLLM's modules. Names that follow no
# class only have to be there; those of a class are attributes that are read, and methods with the
# parameters that we pass, or read when vLLM calls; behind a ``def``, methods of ours that it calls.
_TABLE: Final = {
    Part.ALL: """
        # plugin, shapes, patches, doctor
        from vllm.engine.arg_utils
            EngineArgs.create_engine_config EngineArgs.add_cli_args EngineArgs.from_cli_args
        from vllm.utils.argparse_utils
            FlexibleArgumentParser
        from vllm.config
            VllmConfig ModelConfig
            VllmConfig: cache_config kv_transfer_config model_config parallel_config
                scheduler_config additional_config
            KVTransferConfig: kv_connector kv_connector_module_path kv_role
                kv_load_failure_policy kv_connector_extra_config is_kv_transfer_instance
                has_connector(connector_name) get_from_extra_config(key, default)
            CacheConfig: enable_prefix_caching
            ModelConfig: is_attention_free is_encoder_decoder is_hybrid model enable_sleep_mode
                served_model_name architectures
            ParallelConfig: distributed_executor_backend local_world_size
                data_parallel_size_local world_size decode_context_parallel_size
                prefill_context_parallel_size
            SchedulerConfig: max_num_batched_tokens max_num_seqs
        from vllm.platforms
            current_platform CpuArchEnum.X86 CpuArchEnum.ARM CpuArchEnum.RISCV
            Platform: is_cpu() get_cpu_architecture()
        from vllm.envs
            VLLM_ENABLE_V1_MULTIPROCESSING VLLM_DISABLE_REQUEST_ID_RANDOMIZATION
        from vllm.v1.executor.abstract
            Executor: init_kv_output_aggregator(connector)
        from vllm.distributed.kv_transfer.kv_connector.factory
            KVConnectorFactory.create_connector
        # what vLLM's scheduler calls, and what it hands over
        from vllm.distributed.kv_transfer.kv_connector.v1.base
            KVConnectorMetadata SupportsHMA KVConnectorRole.SCHEDULER
            KVConnectorBase_V1: __init__(vllm_config, role, kv_cache_config) role
                requires_kv_delivery _vllm_config _kv_cache_config _kv_transfer_config
                _kv_cache_manager _connector_metadata
            def KVConnectorBase_V1: bind_kv_cache_manager(kv_cache_manager)
                bind_gpu_block_pool(gpu_block_pool) on_new_request(request)
                get_num_new_matched_tokens(request, num_computed_tokens)
                update_state_after_alloc(request, blocks, num_external_tokens)
                build_connector_meta(scheduler_output) update_connector_output(connector_output)
                request_finished(request, block_ids) has_pending_push_work() reset_cache()
                shutdown()
            def SupportsHMA: request_finished_all_groups(request, block_ids)
        from vllm.v1.core.sched.output
            SchedulerOutput: total_num_scheduled_tokens preempted_req_ids
        from vllm.v1.outputs
            KVConnectorOutput: finished_recving kv_connector_worker_meta
        from vllm.v1.core.kv_cache_manager
            KVCacheBlocks: get_block_ids()
        from vllm.v1.kv_cache_interface
            KVCacheConfig: kv_cache_groups
            KVCacheGroupSpec: kv_cache_spec layer_names
            FullAttentionSpec: block_size page_size_bytes
            UniformTypeKVCacheSpecs: kv_cache_specs
        from vllm.v1.request
            Request: request_id status block_hashes num_tokens num_prompt_tokens
                num_computed_tokens cache_salt kv_transfer_params session_id lora_request
                resumable prompt_token_ids max_tokens arrival_time
        # observe, free_queue
        from vllm.v1.core.block_pool
            BlockPool: blocks num_gpu_blocks hash_block_size enable_caching free_block_queue
                cached_block_hash_to_block cache_full_blocks(request, blocks, num_cached_blocks,
                num_full_blocks, block_size, kv_cache_group_id)
                _emit_block_removed_events(block_hashes) reset_prefix_cache()
                free_blocks(ordered_blocks) get_num_free_blocks() touch(blocks)
            BlockHashToBlockMap: get_one_block(key) __len__()
        from vllm.v1.core.kv_cache_utils
            KVCacheBlock: block_id ref_cnt block_hash is_null prev_free_block next_free_block
            FreeKVCacheBlockQueue: fake_free_list_head fake_free_list_tail popleft_n(n)
                remove(block) prepend_n(blocks) append_n(blocks) iter_blocks_after(cursor)
        """,
    Part.ADMISSION: """
        # holding, patches
        from vllm.v1.core.sched.scheduler
            Scheduler.__init__
            Scheduler: connector waiting running kv_holding_waiting requests deferred_waiting
                num_waiting_for_streaming_input add_request(request)
                _enqueue_waiting_request(request)
        from vllm.v1.core.sched.request_queue
            def RequestQueue: add_request(request) prepend_request(request)
                prepend_requests(requests) remove_request(request) remove_requests(requests)
                peek_request() pop_request() __bool__() __len__() __iter__()
        from vllm.v1.request
            Request: num_preemptions priority is_finished()
        """,
    Part.TIERS: """
        # tiers
        from vllm.v1.core.block_pool
            BlockPool: get_new_blocks(num_blocks) _insert_block_hash(block_hash_with_group_id,
                block, num_tokens)
        from vllm.v1.core.kv_cache_manager
            KVCacheManager: coordinator free(request)
            KVCacheBlocks: blocks
        from vllm.v1.core.kv_cache_coordinator
            KVCacheCoordinator: single_type_managers
        from vllm.v1.core.single_type_kv_cache_manager
            SingleTypeKVCacheManager: req_to_blocks
        from vllm.distributed.kv_transfer.kv_connector.v1.base
            KVConnectorRole.WORKER
            def KVConnectorBase_V1: get_required_kvcache_layout(vllm_config)
                register_kv_caches(kv_caches) start_load_kv(forward_context)
                get_finished(finished_req_ids) get_block_ids_with_load_errors()
                build_connector_worker_meta() wait_for_layer_load(layer_name)
                save_kv_layer(layer_name, kv_layer, attn_metadata) wait_for_save()
            def KVConnectorWorkerMetadata: aggregate(other)
        from vllm.config
            CacheConfig: cache_dtype prefix_caching_hash_algo block_size
                user_specified_block_size kv_cache_dtype_skip_layers
            ModelConfig: hf_config use_mla
            VllmConfig: load_config weight_transfer_config speculative_config
            LoadConfig: load_format
            ParallelConfig: data_parallel_index rank pipeline_parallel_size tensor_parallel_size
            SpeculativeConfig: draft_model_config draft_load_config
        from vllm.v1.request
            Request: skip_reading_prefix_cache
        from vllm.utils.hashing
            get_hash_fn_by_name(hash_fn_name)
        from vllm.v1.core.kv_cache_utils
            hash_block_tokens(hash_function, parent_block_hash, curr_block_token_ids)
        from vllm.v1.kv_cache_layout
            KVCacheLayout.BLHNC
        from vllm.config.utils
            normalize_value(x)
        from vllm.envs
            environment_variables
        """,
    Part.ENDS: """
        # api, ends
        from vllm.renderers
            ChatParams renderer_from_config(config)
        from vllm.renderers.base
            BaseRenderer: render_messages(messages, params) get_tokenizer() shutdown()
        from vllm.tokenizers
            cached_tokenizer_from_config(model_config)
        from vllm.config
            ModelConfig: multimodal_config
        from vllm.v1.request
            Request: output_token_ids structured_output_request
        from vllm.v1.structured_output.request
            StructuredOutputRequest: params
        from vllm.sampling_params
            StructuredOutputsParams: structural_tag
        """,
    Part.SAMPLING: """
        # sampled
        from vllm.v1.worker.gpu_model_runner
            GPUModelRunner: execute_model(scheduler_output) initialize_kv_cache(kv_cache_config,
                is_profiling)
        from vllm.v1.sample.sampler
            Sampler: forward(logits, sampling_metadata)
        from vllm.v1.core.sched.output
            SchedulerOutput: num_scheduled_tokens scheduled_new_reqs
        from vllm.v1.worker.block_table
            BlockTable: get_numpy_array() block_size
        from vllm.config.compilation
            CUDAGraphMode.FULL CUDAGraphMode.NONE
        from vllm.v1.cudagraph_dispatcher
            CudagraphDispatcher: dispatch(num_tokens, invalid_modes)
        from vllm.v1.worker.gpu.model_runner
            GPUModelRunner.prepare_inputs
            GPUModelRunner: execute_model(scheduler_output) initialize_kv_cache(kv_cache_config,
                is_profiling) sample_tokens(grammar_output) cudagraph_manager sampler
        from vllm.v1.worker.gpu.block_table
            BlockTables: block_tables block_sizes
        from vllm.v1.worker.gpu.sample.sampler
            Sampler.sample
        from vllm.v1.worker.gpu.cudagraph_utils
            CudaGraphManager: dispatch(num_reqs, num_tokens, uniform_token_count,
                num_active_loras, max_query_len)
        from vllm.v1.worker.gpu.input_batch
            InputBatch: req_ids idx_mapping_np query_start_loc_np num_computed_tokens_np
        """,
    Part.WAKING: """
        # idle
        from vllm.v1.engine.core
            EngineCoreProc: run_busy_loop() is_scheduler_paused() input_queue
            DPEngineCoreProc: run_busy_loop()
            EngineCore: scheduler vllm_config
        from vllm.v1.engine
            EngineCoreRequestType.WAKEUP
        from vllm.config
            ParallelConfig: data_parallel_size
        """,
}
_TOKEN: Final = re.compile(
    r"#.*|from (?P<module>\S+)|(?P<ours>def )?(?P<owner>[\w.]+):"
    r"|(?P<name>[\w.]+)(?P<call>\([^)]*\))?"
)


def _needs(part: Part, table: str) -> Iterator[Need]:
    module = owner = ours = ""
    for token in _TOKEN.finditer(table):
        if token["module"]:
            module, owner, ours = token["module"], "", ""
        elif token["owner"]:
            owner, ours = token["owner"], token["ours"]
        elif name := token["name"]:
            use = Use.CALLED if token["call"] else Use.READ if owner else Use.NAMED
            path = f"{owner}.{name}" if owner else name
            parameters = tuple(re.findall(r"\w+", token["call"] or ""))
            yield Need(module, path, Use.OVERRIDDEN if ours else use, parameters, part)


RELIED_ON: Final[tuple[Need, ...]] = tuple(
    need for part, table in _TABLE.items() for need in _needs(part, table)
)


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
