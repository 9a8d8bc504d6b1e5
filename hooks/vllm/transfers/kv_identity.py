"""What the bytes of an engine's KV depend on, and what tells a model's weights from others."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from ....kernels.errors import StorageError

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig, VllmConfig

_WEIGHTS: Final = (
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".tensors"
)  # fmt: skip
_FROM_FILES: Final = (
    "auto", "bitsandbytes", "fastsafetensors", "gguf", "hf", "instanttensor", "mistral", "npcache",
    "pt", "runai_streamer", "runai_streamer_sharded", "safetensors", "sharded_state",
)  # fmt: skip
"""Formats whose loaders read the files of the model's own path, or of its hub's commit. All others
make weights up (dummy) or take them from elsewhere (a daemon, a peer, a URI, a plugin's)."""

CHANGES_NOTHING: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        owner: frozenset(names.split())
        for owner, names in {
            # where and when, not what: sizes, ports, logs; and what the numbers' last bits depend
            # on (batches, graphs, fusions), in which two runs of one engine differ as well
            "VllmConfig": """scheduler_config offload_config aux_output_config engram_config
                watermark_config structured_outputs_config observability_config logging_config
                compilation_config profiler_config kv_transfer_config kv_events_config
                ec_transfer_config ec_manager_config reasoning_config instance_id
                optimization_level performance_mode shutdown_timeout
                lora_config quant_config weight_transfer_config""",
            # the last three: no adapter's KV leaves the process; follows from the model's; refused
            "ModelConfig": """tokenizer tokenizer_mode tokenizer_revision trust_remote_code seed
                allowed_local_media_path allowed_media_domains spec_target_max_model_len
                allow_deprecated_quantization enforce_eager return_sampling_mask max_logprobs
                logprobs_mode use_fp64_gumbel enable_trace_replay disable_cascade_attn
                skip_tokenizer_init enable_prompt_embeds served_model_name hf_token
                generation_config override_generation_config enable_sleep_mode
                sleep_preserve_parameter_names sleep_mode_backend sleep_mode_offload_cudagraph
                enable_nccl_comm_suspend enable_cumem_allocator logits_processors
                io_processor_plugin renderer_num_workers pooler_config
                hf_overrides hf_config_path config_format""",
            # the last three: what they lead to is in hf_config
            "MultiModalConfig": """limit_per_prompt enable_mm_embeds mm_processor_cache_gb
                mm_processor_cache_type mm_shm_cache_max_object_size_mb mm_encoder_only
                mm_encoder_tp_mode interleave_mm_strings skip_mm_profiling mm_tensor_ipc
                allow_missing_mm_embeddings mm_ipc_gpu_memory_gb mm_encoder_fp8_scale_save_path
                mm_encoder_fp8_scale_save_margin""",
            # the layout of a block is in what names the record
            "CacheConfig": """user_specified_block_size kv_cache_layout prefix_match_unit
                gpu_memory_utilization is_attention_free num_gpu_blocks_override
                enable_prefix_caching prefix_cache_retention_interval mamba_page_size_padded
                skip_page_size_padded num_gpu_blocks num_cpu_blocks effective_attention_block_size
                kv_cache_size_tokens kv_cache_max_concurrency hash_block_size
                cache_hit_alignment_tokens kv_cache_memory_bytes kv_offloading_size
                kv_offloading_backend _block_size_resolved""",
            "LoadConfig": """download_dir safetensors_load_strategy
                safetensors_prefetch_num_threads safetensors_prefetch_block_size device
                use_tqdm_on_load pt_load_map_location""",
            # a worker's own place is in what names its file or record
            "ParallelConfig": """data_parallel_size data_parallel_size_local data_parallel_rank
                data_parallel_rank_local data_parallel_master_ip data_parallel_rpc_port
                dp_sync_interval data_parallel_master_port data_parallel_backend
                data_parallel_external_lb data_parallel_hybrid_lb is_moe_model
                enable_expert_parallel enable_batch_sharded_sampling enable_ep_weight_filter
                enable_eplb eplb_config expert_placement_strategy max_parallel_loading_workers
                disable_custom_all_reduce enable_shm_tensor_arena enable_elastic_ep
                elastic_ep_max_dp_size enable_dbo ubatch_size dbo_decode_token_threshold
                dbo_prefill_token_threshold disable_nccl_for_dp_synchronization
                ray_workers_use_nsight ray_runtime_env placement_group
                distributed_executor_backend master_addr master_port node_rank nnodes numa_bind
                numa_bind_nodes numa_bind_cpus assigned_physical_gpu_ids
                distributed_timeout_seconds cpu_distributed_timeout_seconds world_size rank
                _data_parallel_master_port_list _coord_store_port dcp_comm_backend dcp_q_replicate
                _allow_auto_resolve_cp_interleave_size data_parallel_index _api_process_count
                _api_process_rank enable_fault_tolerance fault_tolerance_config
                all2all_backend""",
            "DeviceConfig": "device",
            "AttentionConfig": "hisparse_config",
            "MambaConfig": "",
            "KernelConfig": """enable_flashinfer_autotune enable_rocm_segmented_attn_autotune
                enable_cutedsl_warmup enable_jit_warmup""",
            "DiffusionConfig": "",
            # how drafts are made and judged; the KV of a draft model's layers is in the blocks
            "SpeculativeConfig": """enforce_eager max_model_len disable_padded_drafter_batch
                use_local_argmax_reduction prompt_lookup_max prompt_lookup_min
                target_model_config target_parallel_config draft_parallel_config
                num_speculative_tokens_per_batch_size suffix_decoding_max_tree_depth
                suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor
                suffix_decoding_min_token_prob rejection_sample_method synthetic_acceptance_rates
                synthetic_acceptance_length enable_adaptive_verification draft_sample_method""",
        }.items()
    }
)
"""Fields of vLLM's configuration, by class, of which KV is independent. See ``disk_identity``."""

_OF_ARITHMETIC: Final = re.compile(
    "PRECISION|INVARIANT|QUANT|E8M0|DTYPE|ACCUM|AITER|AWQ|DEEP_?GEMM|EMULATION|SIMULATION|LAYOUT"
    "|PARTITION|MLA_DISABLE|ALLOW_LONG|W4A8|(INT|FP|BF|NVFP|MXFP|A)(4|8|16)"
)
"""vLLM's environment variables that say in which numbers, or in which order of a block, it
computes; a new one is known by such a word in its name."""


def disk_identity(config: VllmConfig) -> str:
    """Describe all that the bytes on the workers' disks and in a shared store depend on, except
    each worker's share of a block.

    Everything that configures the engine counts, unless ``CHANGES_NOTHING`` names it. So a field
    that is new in vLLM counts at once, at the price of records that are not found again; a test
    names the fields of each class on both sides, and fails until somebody decided about a new one.
    A class that is not named there counts whole. The model's files are told by name, size and time.

    Raises:
        StorageError: The weights cannot be told from others, or a setting cannot be described.
    """
    import vllm

    if config.weight_transfer_config is not None:
        raise StorageError("a trainer replaces this engine's weights while it runs")
    speculative = config.speculative_config
    draft = speculative.draft_model_config if speculative is not None else None
    parts = [
        vllm.__version__,
        _described(config),
        _environment(),
        _loaded(config.model_config, config.load_config),
    ]
    if speculative is not None and draft is not None:
        parts.append(_loaded(draft, speculative.draft_load_config or config.load_config))
    return repr(parts)


def _loaded(model: ModelConfig, load: LoadConfig) -> object:
    """Describe the weights that a loader takes.

    Raises:
        StorageError: They cannot be told from others.
    """
    if load.load_format not in _FROM_FILES:
        raise StorageError(
            f"load_format={load.load_format!r} does not load the files of {model.model}; these do: "
            f"{', '.join(_FROM_FILES)}"
        )
    return weights_of(model)


def _described(value: object) -> object:
    """Describe a value of vLLM's configuration, equal in all processes for equal values."""
    from vllm.config.utils import normalize_value

    if isinstance(value, type) or not is_dataclass(value) or hasattr(value, "to_json_string"):
        return _hashed(value) or normalize_value(value)
    left_out = CHANGES_NOTHING.get(type(value).__name__, frozenset())
    found = []
    for name in sorted({each.name for each in fields(value)} - left_out):
        try:
            found.append((name, _described(getattr(value, name, None))))
        except TypeError as error:
            raise StorageError(f"{type(value).__name__}.{name}: {error}") from None
    return found


def _hashed(value: object) -> str | None:
    """What a platform's own configuration says of itself; None for all else."""
    told = getattr(value, "compute_hash", None)
    return str(told()) if callable(told) and not isinstance(value, type) else None


def _environment() -> object:
    from vllm import envs

    names = [name for name in envs.environment_variables if _OF_ARITHMETIC.search(name)]
    return [(name, os.environ[name]) for name in sorted(names) if name in os.environ]


def weights_of(model: ModelConfig) -> object:
    """Describe what tells a model's weights from others of the same name and shape, without reading
    them.

    Raises:
        StorageError: Nothing does: there is no file of weights, and no commit of a hub.
    """
    path = Path(getattr(model, "model_weights", "") or model.model)
    files = sorted(_files(path))
    # The commit is the configuration's, which may be of another place than the weights.
    commit = getattr(model.hf_config, "_commit_hash", None) if str(path) == model.model else None
    if path.exists() and not any(name.endswith(_WEIGHTS) for name, *_ in files):
        raise StorageError(f"{path} holds no weights, so new ones would not be noticed")
    if not path.exists() and commit is None:
        raise StorageError(f"{path} has no commit, so new weights would not be noticed")
    return commit, files


def _files(path: Path) -> Iterator[tuple[str, str, int, int]]:
    """List each file's name, what its links lead to, its size and its time."""
    if path.is_file():
        yield _stat(path, path.name)
    seen: set[str] = set()
    for folder, below, names in os.walk(path, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:  # a link to a folder above
            below.clear()
            continue
        seen.add(real)
        files = [Path(folder, name) for name in names]
        yield from (_stat(file, str(file.relative_to(path))) for file in files if file.is_file())


def _stat(file: Path, name: str) -> tuple[str, str, int, int]:
    stat = file.stat()
    return name, os.path.realpath(file), stat.st_size, stat.st_mtime_ns
