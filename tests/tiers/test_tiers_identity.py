"""What names an engine's KV on disk and in a store: all that its bytes depend on, and no more."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Iterator
from copy import copy
from dataclasses import fields, is_dataclass, make_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvgraph.kernels.errors import StorageError
from kvgraph.kernels.layout_engines import cpu_layout

pytestmark = pytest.mark.usefixtures("vllm_loaded")

CHANGES_KV = {
    "VllmConfig": """additional_config attention_config cache_config device_config diffusion_config
        kernel_config load_config mamba_config model_config parallel_config speculative_config""",
    "ModelConfig": """code_revision convert disable_sliding_window dtype hf_config hf_text_config
        is_submodel_config max_model_len model model_class_overrides model_impl model_weights
        multimodal_config quantization quantization_config revision runner
        word_embeddings_untied_by_checkpoint""",
    "MultiModalConfig": """language_model_only media_io_kwargs mm_device_do_normalize
        mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_hasher_algorithm
        mm_processor_kwargs video_pruning_method video_pruning_rate""",
    "CacheConfig": """block_size cache_dtype enable_mamba_shared_prefix_checkpoint
        kv_cache_dtype_skip_layers kv_sharing_fast_prefill mamba_block_size mamba_cache_dtype
        mamba_cache_mode mamba_ssm_cache_dtype prefix_caching_hash_algo replayssm_buffer_len
        sliding_window swa_bounded_replay use_kda_recoverssm use_replayssm""",
    "LoadConfig": "ignore_patterns load_format model_loader_extra_config",
    "ParallelConfig": """cp_kv_cache_interleave_size dcp_kv_cache_interleave_size
        decode_context_parallel_size enable_hc_sp pipeline_parallel_size
        prefill_context_parallel_size tensor_parallel_size worker_cls worker_extension_cls""",
    "DeviceConfig": "device_type",
    "AttentionConfig": """backend backend_per_kind disable_flashinfer_q_quantization
        flash_attn_max_num_splits_for_cuda_graph flash_attn_version flex_attn_block_m
        flex_attn_block_n flex_attn_kv_block_size flex_attn_q_block_size indexer_kv_dtype
        indexer_sparse_logits minimax_m3_msa_decode_backend mla_prefill_backend
        sparse_mla_force_mqa sparse_mla_prefill_workspace_factor tokenspeed_mla_min_split_kv
        tq_max_kv_splits_for_cuda_graph use_non_causal use_prefill_query_quantization
        use_trtllm_attention""",
    "MambaConfig": """backend enable_stochastic_rounding ssu_algorithm
        stochastic_rounding_philox_rounds""",
    "KernelConfig": """ir_op_priority linear_backend linear_backend_per_quant moe_backend
        sparse_indexer_topk_backend""",
    "DiffusionConfig": "canvas_length max_denoising_steps",
    "SpeculativeConfig": """attention_backend code_revision disable_eagle_block_drop
        draft_load_config draft_model_config draft_tensor_parallel_size dspark_draft_topk
        index_share_for_mtp_iteration kv_cache_dtype method model moe_backend
        num_speculative_tokens parallel_drafting quantization revision tensor_parallel_size
        use_heterogeneous_vocab""",
}


def vllm_class(name: str) -> Any:
    import vllm.config

    for module in pkgutil.iter_modules(vllm.config.__path__):
        found = getattr(importlib.import_module(f"vllm.config.{module.name}"), name, None)
        if is_dataclass(found):
            return found
    raise AssertionError(f"vLLM has no {name}")


def identity(config: Any) -> str:
    from kvgraph.hooks.vllm.tiers.worker import disk_identity

    return disk_identity(config)


@pytest.mark.parametrize("owner", CHANGES_KV)
def test_somebody_decided_of_each_field_whether_kv_depends_on_it(owner: str) -> None:
    """It fails when vLLM gets a new field: name it above, or in ``CHANGES_NOTHING``."""
    from kvgraph.hooks.vllm.tiers.worker import CHANGES_NOTHING

    counts, left_out = set(CHANGES_KV[owner].split()), CHANGES_NOTHING[owner]
    assert counts.isdisjoint(left_out)
    assert {each.name for each in fields(vllm_class(owner))} == counts | left_out


def test_no_class_is_left_out_of_the_list_above() -> None:
    from kvgraph.hooks.vllm.tiers.worker import CHANGES_NOTHING

    assert CHANGES_NOTHING.keys() == CHANGES_KV.keys()


def whole(config: Any) -> Any:
    """``config`` with every part, a draft model's among them."""
    config = copy(config)
    config.model_config = model = copy(config.model_config)
    model.multimodal_config = vllm_class("MultiModalConfig")()
    config.diffusion_config = vllm_class("DiffusionConfig")(canvas_length=8)
    config.speculative_config = draft = copy_of_nothing("SpeculativeConfig")
    draft.draft_model_config, draft.draft_load_config = copy(model), copy(config.load_config)
    return config


def copy_of_nothing(owner: str) -> Any:
    """A configuration that nobody checked."""
    made = object.__new__(cls := vllm_class(owner))
    for each in fields(cls):
        setattr(made, each.name, None)
    return made


def parts_of(config: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The way to each part whose fields are decided of one by one, the outermost first."""
    yield path
    owner = functools.reduce(getattr, path, config)
    for name in CHANGES_KV[type(owner).__name__].split():
        if type(getattr(owner, name)).__name__ in CHANGES_KV:
            yield from parts_of(config, (*path, name))


def with_other(owner: Any, path: tuple[str, ...], name: str) -> Any:
    """A copy in which one field of the part at ``path`` is another."""
    other = copy(owner)
    inner = with_other(getattr(owner, path[0]), path[1:], name) if path else "another"
    setattr(other, path[0] if path else name, inner)
    return other


def test_every_field_that_counts_gives_another_name(paper_config: Any) -> None:
    config = whole(paper_config)
    before, same, tried = identity(config), [], set()
    for path in parts_of(config):
        owner = functools.reduce(getattr, path, config)
        for name in CHANGES_KV[type(owner).__name__].split():
            if type(getattr(owner, name)).__name__ in CHANGES_KV:
                continue  # field by field
            tried.add((*path, name))
            try:
                if identity(with_other(config, path, name)) == before:
                    same.append((*path, name))
            except StorageError:
                continue  # it has no name at all
    assert not same
    assert {path[0] for path in tried} == set(CHANGES_KV["VllmConfig"].split())
    assert ("speculative_config", "draft_model_config", "quantization") in tried


def test_a_field_that_vllm_gets_counts_at_once(paper_config: Any) -> None:
    """Until somebody decided, copies under its old value are not found; never a wrong one."""
    config, names = copy(paper_config), set()
    for value in (0, 1):
        config.attention_config = make_dataclass("AttentionConfig", ["new"])(value)
        names.add(identity(config))
    assert len(names) == 2


@pytest.mark.parametrize(
    ("owner", "values"),
    [
        (None, {"instance_id": "b", "optimization_level": 0, "performance_mode": "throughput"}),
        ("model_config", {"seed": 7, "served_model_name": "x", "hf_token": "t"}),
        ("model_config", {"enforce_eager": False, "hf_overrides": print, "tokenizer": "other"}),
        ("cache_config", {"num_gpu_blocks": 7, "gpu_memory_utilization": 0.1}),
        ("parallel_config", {"data_parallel_rpc_port": 7, "data_parallel_size": 4, "rank": 3}),
        ("load_config", {"use_tqdm_on_load": False, "download_dir": "/x", "device": "cpu"}),
    ],
)
def test_two_engines_that_compute_the_same_find_each_other(
    paper_config: Any, owner: str | None, values: dict[str, Any]
) -> None:
    config = copy(paper_config)
    part = config if owner is None else copy(getattr(config, owner))
    for name, value in values.items():
        setattr(part, name, value)
    if owner is not None:
        setattr(config, owner, part)
    assert identity(config) == identity(paper_config)


@pytest.mark.parametrize(
    "load",
    [
        {"load_format": "dummy"},
        {"load_format": "tensorizer", "model_loader_extra_config": {"tensorizer_uri": "s3://a"}},
        {"load_format": "ipc_cache"},
        {"load_format": "modelexpress"},
        {"load_format": "a_plugins_own"},
    ],
)
def test_weights_that_are_not_the_files_get_no_copies_that_outlive_the_process(
    paper_config: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, load: dict[str, Any]
) -> None:
    from kvgraph.hooks.settings import StoreSettings, TierSettings
    from kvgraph.hooks.vllm.tiers.store import open_records
    from kvgraph.hooks.vllm.tiers.worker import open_disk

    config = copy(paper_config)
    config.load_config = copy(config.load_config)
    for name, value in load.items():
        setattr(config.load_config, name, value)
    memory: Any = SimpleNamespace(layout=cpu_layout("vec", 2, 12, 2, 32, 32))
    settings = TierSettings(1 << 20, 4 << 16, tmp_path / "disk")
    assert open_disk(config, settings, memory, 1 << 16) is None
    assert open_records(config, StoreSettings(str(tmp_path / "store"), 1 << 20), memory) is None
    assert caplog.text.count("does not load the files") == 2
    assert not list(tmp_path.rglob("*.tier"))


def test_a_draft_with_made_up_weights_is_no_better(paper_config: Any) -> None:
    config = whole(paper_config)
    identity(config)
    config.speculative_config.draft_load_config.load_format = "dummy"
    with pytest.raises(StorageError, match="dummy"):
        identity(config)


def test_weights_that_a_trainer_pushes_are_no_checkpoints(paper_config: Any) -> None:
    config = copy(paper_config)
    config.weight_transfer_config = vllm_class("WeightTransferConfig")()
    with pytest.raises(StorageError, match="trainer"):
        identity(config)


def test_weights_of_another_place_than_the_configurations_are_told_by_that_place(
    paper_config: Any, tmp_path: Path
) -> None:
    config = copy(paper_config)
    config.model_config = copy(config.model_config)
    config.model_config.model_weights = "s3://bucket/model"
    with pytest.raises(StorageError, match="no commit"):
        identity(config)
    (tmp_path / "model.safetensors").write_bytes(b"other")
    config.model_config.model_weights = str(tmp_path)
    assert str(tmp_path) in identity(config)


@pytest.mark.parametrize(
    "variable",
    [
        "VLLM_CPU_INT4_W4A8", "VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "VLLM_PP_LAYER_PARTITION",
        "VLLM_MARLIN_INPUT_DTYPE", "VLLM_BATCH_INVARIANT", "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT",
        "VLLM_FLOAT32_MATMUL_PRECISION", "VLLM_USE_DEEP_GEMM_E8M0",
        "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION", "VLLM_B12X_MOE_FP4_FORCE_A16",
    ],
)  # fmt: skip
def test_variables_that_choose_the_numbers_count(
    paper_config: Any, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    before = identity(paper_config)
    monkeypatch.setenv(variable, "1")
    assert identity(paper_config) != before


def test_variables_of_a_machine_do_not(paper_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = identity(paper_config)
    for variable in ("VLLM_DP_RANK", "VLLM_HOST_IP", "VLLM_PORT", "VLLM_CACHE_ROOT", "HOME"):
        monkeypatch.setenv(variable, "1")
    assert identity(paper_config) == before


def test_a_plugins_model_in_the_place_of_vllms_is_another(
    paper_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.models.registry import ModelRegistry

    before, names = identity(paper_config), set()
    monkeypatch.setattr(ModelRegistry, "models", dict(ModelRegistry.models))
    for place in ("somebodys.models:Llama", "somebodys.models:Other"):
        ModelRegistry.register_model(paper_config.model_config.architecture, place)
        names.add(identity(paper_config))
    assert len(names | {before}) == 3


def test_a_setting_that_cannot_be_described_gives_no_name(paper_config: Any) -> None:
    config = copy(paper_config)
    config.additional_config = {"act": lambda: None}
    with pytest.raises(StorageError, match=r"VllmConfig\.additional_config"):
        identity(config)
