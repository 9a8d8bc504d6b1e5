"""Everything of vLLM's that the hooks rely on, so that a version that lacks it is told in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from .fit import Need, Part, Use

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
    """Rows of attributes of one class."""
    for name in names.split():
        yield Need(module, f"{owner}.{name}", Use.READ, (), part)


def _named(module: str, paths: str, part: Part = Part.ALL) -> Iterator[Need]:
    for path in paths.split():
        yield Need(module, path, Use.NAMED, (), part)


_STARTING: Final = (  # plugin, shapes, beside, compose, aggregation, doctor
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
_ADMISSION: Final = (  # holding, scheduler_hook
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
_TIERS: Final = (  # transfers
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
        f"{_CORE}.kv_cache_coordinator",
        "KVCacheCoordinator",
        "single_type_managers",
        Part.TIERS,
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
