"""A worker's end of the connector: its shard of the cache, and the mover that serves it."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from ....kernels.disk import DiskTier
from ....kernels.errors import StorageError
from ...settings import DISK_SUFFIX, FILE_PREFIX, TIERS_KEY, TierSettings
from ...tiers.host import DiskOrphans, DiskSweep, share_of
from ...tiers.jobs import Answers, TierAnswer, TierWork, WorkerStart

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig, VllmConfig

    from ....kernels.layout import PagedKv
    from ....kernels.rope import Rope
    from ...tiers.lanes import Records
    from ...tiers.mover import TierMover

logger = logging.getLogger(__name__)

OpenRecords = Callable[["VllmConfig", "PagedKv"], "tuple[Records, str] | None"]
"""Opens the shared store's records of one worker's shard; returns them and their name."""


@dataclass
class TierMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """One step's orders, sent from the scheduler to its workers by vLLM."""

    work: TierWork


@dataclass
class TierWorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """The workers' answers, sent back by vLLM."""

    answer: TierAnswer

    def aggregate(self, other: TierWorkerMetadata) -> TierWorkerMetadata:
        """Join two workers' answers; ``JobBook`` counts until the last one."""
        return TierWorkerMetadata(self.answer + other.answer)


class WorkerSide:
    """Moves this worker's shard as ordered; answers jobs that cannot be done as failed. ``mover``
    is None before there is a cache, and if creating it failed.
    """

    def __init__(
        self,
        config: VllmConfig,
        settings: TierSettings,
        open_records: OpenRecords | None = None,
    ) -> None:
        self._config = config
        self._open_records = open_records
        self._settings = settings
        self.mover: TierMover | None = None
        self._answers = Answers(WorkerStart())
        self._failed_blocks: set[int] = set()
        self._sweep: DiskSweep | None = None

    def register(self, views: dict[str, Any]) -> None:
        """Register vLLM's views by layer. Memory is committed when the first copies come."""
        try:
            self.serve(described(views, self._config))
        except Exception as error:
            logger.warning(
                "kvgraph: no tiers on this worker (%s: %s); blocks are computed again",
                type(error).__name__,
                error,
            )

    def serve(self, cache: PagedKv) -> None:
        """Start serving this shard, with new memory and disk; earlier ones must be closed. Raises
        if there is no memory, no disk, or no way to move this cache.
        """
        self.mover = self._new_mover(cache)
        self._answers = self.mover.answers

    def submit(self, work: TierWork) -> None:
        if self.mover is not None:
            self.mover.submit(work)
        else:
            self._answers.refuse(work)

    def take_finished(self) -> set[str]:
        """Return the requests whose loads ended; ``take_failed`` has their failed blocks."""
        if self.mover is not None:
            self.mover.lanes.give_up_on_overdue()
        finished, self._failed_blocks = self._answers.take_loaded()
        return finished

    def take_failed(self) -> set[int]:
        """Return the failed blocks of the requests that ``take_finished`` named last."""
        return self._failed_blocks

    def take_answer(self) -> TierAnswer:
        return self._answers.take_answer()

    def close(self) -> None:
        if self._sweep is not None:
            self._sweep.close()
        if self.mover is not None:
            self.mover.close()

    def _new_mover(self, cache: PagedKv) -> TierMover:
        from ....kernels import ops
        from ....kernels.arena import Arena
        from ...tiers.mover import TierMover

        given = granted_bytes(self._settings)
        if cache.memory.is_cuda:
            logger.info("kvgraph: page-locking %.1f GiB of host memory for copies", given / 2**30)
        arena = Arena.for_cache(cache.layout, given)
        ops.prepare(cache, arena.kv)  # compiled and measured now, where it holds up no request
        disk = open_disk(self._config, self._settings, cache, arena.record_bytes)
        self._sweep = None
        if disk is not None:
            self._sweep = DiskSweep(disk.path, _orphans_beside(disk.path))
        store = self._open_records(self._config, cache) if self._open_records else None
        mover = TierMover(
            cache, arena, disk, hash_bytes(self._config), rope=rope_of(self._config), store=store
        )
        logger.info(
            "kvgraph: tiers on: %d blocks of %d bytes in host memory%s",
            arena.capacity,
            arena.record_bytes,
            f", {disk.capacity} on disk" if disk is not None else "",
        )
        return mover


def rope_of(config: VllmConfig) -> Rope | None:
    """Return how keys of this model are moved to other positions; None if they cannot be."""
    from ....kernels.errors import RopeError
    from ....kernels.rope import rope_from_config

    model = config.model_config
    try:
        return rope_from_config(model.hf_config, model.max_model_len)
    except RopeError:
        return None


def granted_bytes(settings: TierSettings) -> int:
    """Return the bytes of host memory for one worker's copies: the amount configured, or its share
    of what is available. Logs a warning if that is less.
    """
    given = share_of(settings.warm_bytes, settings.sharers)
    if given < settings.warm_bytes:
        logger.warning(
            "kvgraph: %.1f GiB of host memory for copies instead of the %.1f asked for: there "
            "is no more for each of the %d workers that share this machine or container",
            given / 2**30,
            settings.warm_bytes / 2**30,
            settings.sharers,
        )
    return given


def described(views: dict[str, Any], config: VllmConfig) -> PagedKv:
    """Describe the engine's cache as one paged memory; LayoutError if it is unknown."""
    from vllm.platforms import current_platform

    from ....kernels import layout_engines as engines

    ordered = sorted(views.values(), key=lambda view: int(view.storage_offset()))
    _, _, tokens, cell = ordered[0].shape
    on_cpu = current_platform.is_cpu()
    isa = engines.cpu_isa(ordered[0].dtype, tokens, cell // 2) if on_cpu else None
    mla, whole = config.model_config.use_mla, config.cache_config.block_size
    return engines.from_views(ordered, isa=isa, mla=mla, tokens=whole)


def hash_bytes(config: VllmConfig) -> int:
    """Return the length of the engine's block hashes, in bytes."""
    from vllm.utils.hashing import get_hash_fn_by_name

    return len(get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)(None))


# What the bytes of an engine's KV depend on, and what distinguishes a model's weights from others.

_WEIGHTS: Final = (
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".tensors"
)  # fmt: skip
_FROM_FILES: Final = (
    "auto", "bitsandbytes", "fastsafetensors", "gguf", "hf", "instanttensor", "mistral", "npcache",
    "pt", "runai_streamer", "runai_streamer_sharded", "safetensors", "sharded_state",
)  # fmt: skip
"""Formats whose loaders read the files at the model's own path or of its hub commit. All others
invent weights (dummy) or take them from elsewhere (a daemon, a peer, a URI, a plugin's).
"""

CHANGES_NOTHING: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        owner: frozenset(names.split())
        for owner, names in {
            # where and when, not what: sizes, ports, logs; and what affects only the last bits of
            # numbers (batches, graphs, fusions), in which two runs of one engine differ as well
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
            # the last three: their effect is in hf_config
            "MultiModalConfig": """limit_per_prompt enable_mm_embeds mm_processor_cache_gb
                mm_processor_cache_type mm_shm_cache_max_object_size_mb mm_encoder_only
                mm_encoder_tp_mode interleave_mm_strings skip_mm_profiling mm_tensor_ipc
                allow_missing_mm_embeddings mm_ipc_gpu_memory_gb mm_encoder_fp8_scale_save_path
                mm_encoder_fp8_scale_save_margin""",
            # the layout of a block is in the record's name
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
            # a worker's rank is in the name of its file or record
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
"""Fields of vLLM's configuration, by class, on which KV does not depend. See ``disk_identity``."""

_OF_ARITHMETIC: Final = re.compile(
    "PRECISION|INVARIANT|QUANT|E8M0|DTYPE|ACCUM|AITER|AWQ|DEEP_?GEMM|EMULATION|SIMULATION|LAYOUT"
    "|PARTITION|MLA_DISABLE|ALLOW_LONG|W4A8|(INT|FP|BF|NVFP|MXFP|A)(4|8|16)"
    "|DISABLED_KERNELS|HW_AGNOSTIC"  # of kernels for quantised layers, some quantise what they read
    "|VIDEO_LOADER|MEDIA_CONNECTOR"  # of a picture that its client names, only the name is hashed
)
"""Parts of the names of vLLM's environment variables that choose number formats or the order of
numbers in a block; a new variable is recognised by such a word.
"""
_OF_LIBRARIES: Final = (
    "DNNL_DEFAULT_FPMATH_MODE", "HIPBLASLT_ALLOW_TF32", "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_DEFAULT_FPMATH_MODE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)  # fmt: skip
"""Variables that make libraries used by vLLM multiply floats with fewer bits."""


def disk_identity(config: VllmConfig) -> str:
    """Describe all that the bytes on the workers' disks and in a shared store depend on, except
    each worker's share of a block. Raises StorageError if the weights cannot be told from others,
    or a setting cannot be described.

    Every setting of the engine counts unless ``CHANGES_NOTHING`` names it. So a new field of vLLM
    counts at once, at the cost of records that are not found again. A test lists the fields of each
    class on both sides, and fails until each new one is classified. A class that is not listed
    counts as a whole. The model's files are identified by name, size and time.
    """
    import transformers
    import vllm

    if config.weight_transfer_config is not None:
        raise StorageError("a trainer replaces this engine's weights while it runs")
    speculative = config.speculative_config
    draft = speculative.draft_model_config if speculative is not None else None
    overrides = config.model_config.hf_overrides
    parts = [
        vllm.__version__,
        transformers.__version__,  # whose defaults, and perhaps model, are used
        _described(config),
        # Their effect is in hf_config, but for files that they name, as a quantization_config_file.
        [_described(each) for each in overrides.values() if isinstance(each, str)]
        if isinstance(overrides, dict)
        else [],
        _environment(),
        _device(),
        _implementation(config.model_config),
        _loaded(config.model_config, config.load_config),
    ]
    if speculative is not None and draft is not None:
        parts.append(_implementation(draft))
        parts.append(_loaded(draft, speculative.draft_load_config or config.load_config))
    return repr(parts)


def _loaded(model: ModelConfig, load: LoadConfig) -> object:
    """Describe the weights that a loader takes; StorageError if others may look the same."""
    if load.load_format not in _FROM_FILES:
        raise StorageError(
            f"load_format={load.load_format!r} does not load the files of {model.model}; these do: "
            f"{', '.join(_FROM_FILES)}"
        )
    return weights_of(model)


def _described(value: object) -> object:
    """Describe a value of vLLM's configuration, equal in all processes for equal values."""
    from vllm.config.utils import normalize_value

    if isinstance(value, str) and os.path.isfile(value):
        return _stat(Path(value), value)  # what it names is read, and may be edited in place
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


def _implementation(model: ModelConfig) -> object:
    """Name the class that computes a model: a plugin may have put its own in place of vLLM's."""
    models = getattr(getattr(model, "registry", None), "models", {})
    entry = models.get(getattr(model, "_architecture", None))
    made = getattr(entry, "model_cls", None)
    if made is not None:
        return made.__module__, made.__qualname__
    return getattr(entry, "module_name", None), getattr(entry, "class_name", None)


def _environment() -> object:
    from vllm import envs

    names = [name for name in envs.environment_variables if _OF_ARITHMETIC.search(name)]
    names += _OF_LIBRARIES
    return [(name, os.environ[name]) for name in sorted(names) if name in os.environ]


def _device() -> object:
    """Tell the generation of the device: by it vLLM chooses whether layers of 8 bits multiply in 8
    bits, which an older one cannot.
    """
    from vllm.platforms import current_platform

    found = current_platform.get_device_capability()
    return tuple(found) if found is not None else None


def weights_of(model: ModelConfig) -> object:
    """Describe what distinguishes a model's weights from others of the same name and shape, without
    reading them. Raises StorageError if nothing does: neither files of weights nor a hub commit.
    """
    path = Path(getattr(model, "model_weights", "") or model.model)
    files, commit = sorted(_files(path)), _commit(model, str(path))
    if path.exists() and not any(name.endswith(_WEIGHTS) for name, *_ in files):
        raise StorageError(f"{path} holds no weights, so new ones would not be noticed")
    if not path.exists() and commit is None:
        raise StorageError(f"{path} has no commit, so new weights would not be noticed")
    return commit, files


def _commit(model: ModelConfig, path: str) -> str | None:
    """Return the commit of a hub that the weights are of; None if nobody knows."""
    if path != model.model:
        return None
    if getattr(model, "hf_config_path", None) in (None, path):
        return getattr(model.hf_config, "_commit_hash", None)
    # That of the configuration is another place's. A revision may remember what it was resolved to.
    return getattr(model.revision, "resolved", None)


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


# The order of a cache's axes that tiers request from vLLM: all layers of a block contiguous.

BLOCKS_OUTERMOST: Final = "BLHNC"
"""vLLM's name for that layout: copying a block takes one copy, but one per layer in the usual
ones.
"""


def wanted_layout(config: VllmConfig) -> str | None:
    """Return the layout to request; None if any will do. Never raises: engines start with the
    answer.

    vLLM asks only if the user chose none (``VLLM_KV_CACHE_LAYOUT``), and makes its own choice, with
    a warning, if the attention backend cannot read this one.
    """
    try:
        return BLOCKS_OUTERMOST if _is_of_use(config) and _is_safe(config) else None
    except Exception as error:
        logger.debug("kvgraph: no order of the cache asked for: %s", type(error).__name__)
        return None


def _is_of_use(config: VllmConfig) -> bool:
    """Whether blocks are copied, and by a machine for which the order is not fixed anyway."""
    from vllm.platforms import current_platform

    transfer = config.kv_transfer_config
    tiers = transfer is not None and transfer.get_from_extra_config(TIERS_KEY, None)
    return bool(tiers) and not current_platform.is_cpu()


def _is_safe(config: VllmConfig) -> bool:
    """Whether no block has to be split.

    Attention that takes smaller blocks than the engine's is given parts of them. In this order
    other layers stand between a block and the next, and vLLM ends with an error. Of itself it
    chooses a size that attention takes whole; a user, or layers of another dtype, may not.
    """
    cache = config.cache_config
    return not cache.user_specified_block_size and not cache.kv_cache_dtype_skip_layers


_DIGEST_DIGITS: Final = 12  # 48 bits in a file name; chosen


def open_disk(
    config: VllmConfig, settings: TierSettings, cache: PagedKv, record_bytes: int
) -> DiskTier | None:
    """Open the disk tier of ``settings``; None, with the reason logged, if impossible."""
    capacity = settings.cold_bytes // record_bytes
    if settings.cold_dir is None or not capacity:
        return None
    try:
        identity = disk_identity(config)
        path = settings.cold_dir / file_name(config, identity)
        whole = repr((identity, _place(config), cache.layout.record(1)))
        orphans = _orphans_beside(path)
        disk = orphans.make_room(lambda: DiskTier(path, record_bytes, capacity, whole))
        with contextlib.suppress(OSError, StorageError):  # a sweep may succeed later
            orphans.age_out(path)
        return disk
    except StorageError as error:
        logger.warning("kvgraph: no disk tier: %s", error)
        return None


def file_name(config: VllmConfig, identity: str) -> str:
    """Return a name for each combination of model, what its bytes depend on, and worker's rank."""
    engine, rank = _place(config)
    model = _digest(str(config.model_config.model))
    return f"{FILE_PREFIX}{model}-{_digest(identity)}-{engine}-{rank}{DISK_SUFFIX}"


def _orphans_beside(path: Path) -> DiskOrphans:
    """Return the files that are of no worker of the engine whose worker has ``path``."""
    own, *_ = path.name.rsplit("-", 2)
    return DiskOrphans(path.parent, f"{own}-")


def _place(config: VllmConfig) -> tuple[int, int]:
    # Of independent engines each has rank 0; the index is what tells them apart.
    parallel = config.parallel_config
    return parallel.data_parallel_index, parallel.rank


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_DIGITS]
