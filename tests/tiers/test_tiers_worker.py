"""A worker's end of the connector: what it cannot do it refuses, and whose bytes a disk holds."""

from __future__ import annotations

import errno
import functools
import importlib
import logging
import os
import pkgutil
import time
from collections.abc import Iterator
from copy import copy
from dataclasses import fields, is_dataclass, make_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvgraph.hooks.settings import StoreSettings, TierSettings
from kvgraph.hooks.tiers.host import DiskOrphans, DiskSweep, available_bytes
from kvgraph.hooks.tiers.jobs import JobDone, Load, Spill, TierAnswer, TierWork, WorkerStart
from kvgraph.hooks.vllm.tiers.store import open_records
from kvgraph.hooks.vllm.tiers.worker import (
    CHANGES_NOTHING,
    TierWorkerMetadata,
    WorkerSide,
    disk_identity,
    granted_bytes,
    hash_bytes,
    open_disk,
    weights_of,
)
from kvgraph.kernels.errors import StorageError
from kvgraph.kernels.layout_engines import cpu_layout
from paper import changed
from vllm.model_executor.models.registry import ModelRegistry
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability

pytestmark = pytest.mark.usefixtures("vllm_loaded")


def test_a_cache_that_is_not_known_is_refused_and_so_is_all_work(
    caplog: pytest.LogCaptureFixture,
) -> None:
    side: Any = WorkerSide(SimpleNamespace(), TierSettings(1 << 20))  # type: ignore[arg-type]
    caplog.set_level(logging.WARNING)
    side.register({"layer": object()})
    side.submit(TierWork((Spill(1, (3,), (1,)), Load(2, (1, 2), (5, 6), {}, "r"))))
    side.submit(TierWork((Load(3, (1,), (7,), {}, None),)))
    assert side.take_finished() == {"r"}
    assert side.take_failed() == {5, 6}
    refused = [JobDone(1, frozenset({0}), 0.0, 0), JobDone(2, frozenset({0, 1}), 0.0, 0)]
    answer = side.take_answer()
    assert answer.done == (*refused, JobDone(3, frozenset({0}), 0.0, 0))
    assert answer.starts == (WorkerStart(),), "nothing is planned with what it does not have"
    assert not side.take_answer()
    assert len([r for r in caplog.records if "no tiers on this worker" in r.getMessage()]) == 1
    side.close()


def test_answers_of_workers_add_up() -> None:
    one, two = (TierAnswer((JobDone(n, frozenset(), 0.0, 0),), (WorkerStart(n),)) for n in (1, 2))
    assert TierWorkerMetadata(one).aggregate(TierWorkerMetadata(two)).answer == one + two


def model_at(path: object, commit: str | None = None) -> Any:
    return SimpleNamespace(model=str(path), hf_config=SimpleNamespace(_commit_hash=commit))


def test_weights_are_told_apart_though_their_directory_has_one_name(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    for at in ("model.safetensors", "parts/more.safetensors"):
        (tmp_path / at).write_bytes(b"old")
        os.utime(tmp_path / at, (1, 1))
    for touched in ("model.safetensors", "parts/more.safetensors"):
        before = weights_of(model_at(tmp_path))
        assert weights_of(model_at(tmp_path)) == before
        os.utime(tmp_path / touched)
        assert weights_of(model_at(tmp_path)) != before


def test_a_link_to_other_weights_of_the_same_size_and_time_is_noticed(tmp_path: Path) -> None:
    link = tmp_path / "model.gguf"
    found = []
    for name in ("old.gguf", "new.gguf"):
        (tmp_path / name).write_bytes(b"same")
        os.utime(tmp_path / name, (1, 1))
        link.unlink(missing_ok=True)
        link.symlink_to(tmp_path / name)
        found.append(weights_of(model_at(link)))
    assert found[0] != found[1]


def test_a_folder_that_contains_itself_is_walked_once(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"old")
    (tmp_path / "again").symlink_to(tmp_path)
    _, files = weights_of(model_at(tmp_path))
    assert [name for name, *_ in files] == ["model.safetensors"]


def test_a_name_on_a_hub_is_told_by_its_commit() -> None:
    assert weights_of(model_at("a/b", "aaa")) != weights_of(model_at("a/b", "bbb"))


def test_a_commit_of_the_configurations_place_says_nothing_of_the_weights() -> None:
    """``--hf-config-path`` may name another place of a hub, whose commits are its own."""
    from huggingface_hub._revision import ResolvedRevision

    model = model_at("a/b", "of another place")
    model.hf_config_path, model.revision = "c/d", None
    with pytest.raises(StorageError, match="no commit"):
        weights_of(model)
    model.revision = ResolvedRevision("the weights' own", None, repo_id="a/b", repo_type="model")
    assert weights_of(model)[0] == "the weights' own"
    model.hf_config_path = "a/b"
    assert weights_of(model)[0] == "of another place"


def test_weights_that_cannot_be_told_from_others_get_no_disk(
    tmp_path: Path, opened: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Of an object store only configurations are here; a hub's name may have no commit."""
    (tmp_path / "config.json").write_text("{}")
    for model in (model_at(tmp_path), model_at("bucket/name")):
        assert opened(model, tmp_path / "disk") is None
    assert "holds no weights" in caplog.text
    assert "has no commit" in caplog.text
    assert not (tmp_path / "disk").exists()


@pytest.fixture
def opened(paper_config: Any) -> Any:
    """Opens a worker's disk for a model as ``model_at`` describes it."""

    def disk(model: Any, directory: Path, index: int = 0, rank: int = 0) -> Any:
        ranks = {"data_parallel_index": index, "rank": rank}
        config = changed(paper_config, "parallel_config", **ranks)
        described = copy(config.model_config.hf_config)
        described._commit_hash = model.hf_config._commit_hash
        config = changed(config, "model_config", model=model.model, hf_config=described)
        memory = SimpleNamespace(layout=cpu_layout("vec", 2, 12, 2, 32, 32))
        settings = TierSettings(1 << 20, 4 << 16, directory)
        return open_disk(config, settings, memory, 1 << 16)

    return disk


def test_each_worker_of_each_independent_engine_has_a_disk_of_its_own(
    tmp_path: Path, opened: Any
) -> None:
    model = model_at("a/b", "aaa")
    disks = [opened(model, tmp_path, index, rank) for index in (0, 1) for rank in (0, 1)]
    assert None not in disks
    for disk in disks:
        disk.close()
    assert len(list(tmp_path.glob("*.tier"))) == 4


def test_two_models_that_take_turns_keep_their_disks(tmp_path: Path, opened: Any) -> None:
    for _ in range(2):
        for number, model in enumerate((model_at("a/b", "aaa"), model_at("c/d", "ccc"))):
            disk = opened(model, tmp_path)
            disk.write(number.to_bytes(32, "big"), bytes(1 << 16))
            assert list(disk) == [number.to_bytes(32, "big")]
            disk.close()


def aged(directory: Path, seconds: float) -> None:
    for path in directory.glob("*.tier"):
        os.utime(path, (time.time() - seconds,) * 2)


def test_files_of_other_weights_and_models_age_out_unless_somebody_has_them_open(
    tmp_path: Path, opened: Any
) -> None:
    day = 86_400
    served = opened(model_at("e/f", "served"), tmp_path)
    for model in (model_at("a/b", "old"), model_at("c/d", "ccc")):
        opened(model, tmp_path).close()
    (tmp_path / "notes.tier").write_text("not ours")
    aged(tmp_path, day - 100)
    opened(model_at("a/b", "new"), tmp_path).close()
    assert len(list(tmp_path.glob("*.tier"))) == 5, "who goes back finds what was left"
    aged(tmp_path, day + 100)
    for rank in (0, 1):
        opened(model_at("a/b", "new"), tmp_path, rank=rank).close()
    left = {path.name for path in tmp_path.glob("*.tier")}
    assert len(left) == 4
    assert {served.path.name, "notes.tier"} < left
    served.close()


def test_orphans_give_way_to_a_file_that_needs_their_space(
    tmp_path: Path, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a disk with room for two files, the one that was left first goes."""
    names, pwrite = list[str](), os.pwrite

    def full_with_two(*args: Any) -> int:
        if len(list(tmp_path.glob("*.tier"))) > 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(*args)

    monkeypatch.setattr(os, "pwrite", full_with_two)
    for seconds, commit in ((300, "one"), (200, "two"), (100, "three")):
        disk = opened(model_at("a/b", commit), tmp_path)
        names.append(disk.path.name)
        disk.close()
        os.utime(disk.path, (time.time() - seconds,) * 2)
    assert {path.name for path in tmp_path.glob("*.tier")} == set(names[1:])


def test_a_sweep_dates_its_own_file_and_removes_what_is_old(tmp_path: Path) -> None:
    own, other = tmp_path / "kvgraph-a-b-0-0.tier", tmp_path / "kvgraph-a-c-0-0.tier"
    for path in (own, other):
        path.write_bytes(b"")
    os.mkfifo(tmp_path / "kvgraph-a-a-0-0.tier")  # to open it would take for ever
    aged(tmp_path, 1e6)
    sweep = DiskSweep(own, DiskOrphans(tmp_path, "kvgraph-a-b-"), period_s=0.01)
    deadline = time.monotonic() + 20
    while other.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    sweep.close()
    assert time.time() - own.stat().st_mtime < 1000


def test_more_memory_than_there_is_for_all_workers_is_capped_in_words(
    caplog: pytest.LogCaptureFixture,
) -> None:
    there, most = available_bytes(), 1 << 50
    assert 0 < granted_bytes(TierSettings(most, sharers=4)) <= 1.1 * there / 4
    assert "each of the 4 workers that share this machine" in caplog.text
    assert granted_bytes(TierSettings(1 << 20, sharers=4)) == 1 << 20


@pytest.mark.parametrize(("algorithm", "length"), [("sha256", 32), ("sha256_cbor", 32)])
def test_the_length_of_hashes_is_asked_for(algorithm: str, length: int) -> None:
    config = SimpleNamespace(cache_config=SimpleNamespace(prefix_caching_hash_algo=algorithm))
    assert hash_bytes(config) == length


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


@pytest.mark.parametrize("owner", CHANGES_KV)
def test_somebody_decided_of_each_field_whether_kv_depends_on_it(owner: str) -> None:
    """It fails when vLLM gets a new field: name it above, or in ``CHANGES_NOTHING``."""
    counts, left_out = set(CHANGES_KV[owner].split()), CHANGES_NOTHING[owner]
    assert counts.isdisjoint(left_out)
    assert {each.name for each in fields(vllm_class(owner))} == counts | left_out


def test_no_class_is_left_out_of_the_list_above() -> None:
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
    before, same, tried = disk_identity(config), [], set()
    for path in parts_of(config):
        owner = functools.reduce(getattr, path, config)
        for name in CHANGES_KV[type(owner).__name__].split():
            if type(getattr(owner, name)).__name__ in CHANGES_KV:
                continue  # field by field
            tried.add((*path, name))
            try:
                if disk_identity(with_other(config, path, name)) == before:
                    same.append((*path, name))
            except StorageError:
                continue  # it has no name at all
    assert not same
    assert {path[0] for path in tried} == set(CHANGES_KV["VllmConfig"].split())
    assert ("speculative_config", "draft_model_config", "quantization") in tried


@pytest.mark.parametrize("named", ["an override", "a field"])
def test_a_file_that_a_setting_names_counts_by_what_it_is(
    paper_config: Any, tmp_path: Path, named: str
) -> None:
    """As a quantization of weights, or scales of an encoder, that somebody edits in place."""
    path, names = tmp_path / "scales.json", set()
    for text in ('{"bits": 8}', '{"bits": 16}'):
        path.write_text(text)
        config = whole(paper_config)
        if named == "an override":
            config.model_config.hf_overrides = {"quantization_config_file": str(path)}
        else:
            config.model_config.multimodal_config.mm_encoder_fp8_scale_path = str(path)
        names.add(disk_identity(config))
    assert len(names) == 2


def test_a_field_that_vllm_gets_counts_at_once(paper_config: Any) -> None:
    """Until somebody decided, copies under its old value are not found; never a wrong one."""
    config, names = copy(paper_config), set()
    for value in (0, 1):
        config.attention_config = make_dataclass("AttentionConfig", ["new"])(value)
        names.add(disk_identity(config))
    assert len(names) == 2


@pytest.mark.parametrize(
    ("owner", "values"),
    [
        ("model_config", {"seed": 7, "served_model_name": "x", "hf_token": "t"}),
        ("model_config", {"enforce_eager": False, "hf_overrides": print, "tokenizer": "other"}),
        ("cache_config", {"num_gpu_blocks": 7, "gpu_memory_utilization": 0.1}),
        ("parallel_config", {"data_parallel_rpc_port": 7, "data_parallel_size": 4, "rank": 3}),
        ("load_config", {"use_tqdm_on_load": False, "download_dir": "/x", "device": "cpu"}),
    ],
)
def test_two_engines_that_compute_the_same_find_each_other(
    paper_config: Any, owner: str, values: dict[str, Any]
) -> None:
    assert disk_identity(changed(paper_config, owner, **values)) == disk_identity(paper_config)


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
    config = changed(paper_config, "load_config", **load)
    memory: Any = SimpleNamespace(layout=cpu_layout("vec", 2, 12, 2, 32, 32))
    settings = TierSettings(1 << 20, 4 << 16, tmp_path / "disk")
    assert open_disk(config, settings, memory, 1 << 16) is None
    assert open_records(config, StoreSettings(str(tmp_path / "store"), 1 << 20), memory) is None
    assert caplog.text.count("does not load the files") == 2
    assert not list(tmp_path.rglob("*.tier"))


def test_two_engines_that_differ_in_their_names_alone_find_each_other(paper_config: Any) -> None:
    config = copy(paper_config)
    config.instance_id, config.optimization_level = "b", 0
    config.performance_mode = "throughput"
    assert disk_identity(config) == disk_identity(paper_config)


def test_a_draft_with_made_up_weights_is_no_better(paper_config: Any) -> None:
    config = whole(paper_config)
    disk_identity(config)
    config.speculative_config.draft_load_config.load_format = "dummy"
    with pytest.raises(StorageError, match="dummy"):
        disk_identity(config)


def test_weights_that_a_trainer_pushes_are_no_checkpoints(paper_config: Any) -> None:
    config = copy(paper_config)
    config.weight_transfer_config = vllm_class("WeightTransferConfig")()
    with pytest.raises(StorageError, match="trainer"):
        disk_identity(config)


def test_weights_of_another_place_than_the_configurations_are_told_by_that_place(
    paper_config: Any, tmp_path: Path
) -> None:
    config = changed(paper_config, "model_config", model_weights="s3://bucket/model")
    with pytest.raises(StorageError, match="no commit"):
        disk_identity(config)
    (tmp_path / "model.safetensors").write_bytes(b"other")
    config.model_config.model_weights = str(tmp_path)
    assert str(tmp_path) in disk_identity(config)


@pytest.mark.parametrize(
    "variable",
    [
        "VLLM_CPU_INT4_W4A8", "VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "VLLM_PP_LAYER_PARTITION",
        "VLLM_MARLIN_INPUT_DTYPE", "VLLM_BATCH_INVARIANT", "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT",
        "VLLM_FLOAT32_MATMUL_PRECISION", "VLLM_USE_DEEP_GEMM_E8M0",
        "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION", "VLLM_B12X_MOE_FP4_FORCE_A16",
        "VLLM_DISABLED_KERNELS", "VLLM_USE_HW_AGNOSTIC", "VLLM_VIDEO_LOADER_BACKEND",
        "VLLM_MEDIA_CONNECTOR", "NVIDIA_TF32_OVERRIDE", "ONEDNN_DEFAULT_FPMATH_MODE",
    ],
)  # fmt: skip
def test_variables_that_choose_the_numbers_count(
    paper_config: Any, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    before = disk_identity(paper_config)
    monkeypatch.setenv(variable, "1")
    assert disk_identity(paper_config) != before


def test_variables_of_a_machine_do_not(paper_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = disk_identity(paper_config)
    for variable in ("VLLM_DP_RANK", "VLLM_HOST_IP", "VLLM_PORT", "VLLM_CACHE_ROOT", "HOME"):
        monkeypatch.setenv(variable, "1")
    assert disk_identity(paper_config) == before


def test_another_release_of_transformers_is_another(
    paper_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a model's configuration leaves out, it has from there."""
    before = disk_identity(paper_config)
    monkeypatch.setattr("transformers.__version__", "99.0")
    assert disk_identity(paper_config) != before


def test_another_generation_of_devices_is_another(
    paper_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers of 8 bits multiply in 8 bits on one, and in 16 on an older one."""
    names = set()
    for capability in (None, DeviceCapability(8, 0), DeviceCapability(9, 0)):
        monkeypatch.setattr(
            type(current_platform),
            "get_device_capability",
            classmethod(lambda cls, device_id=0, told=capability: told),
        )
        names.add(disk_identity(paper_config))
    assert len(names) == 3


def test_a_plugins_model_in_the_place_of_vllms_is_another(
    paper_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, names = disk_identity(paper_config), set()
    monkeypatch.setattr(ModelRegistry, "models", dict(ModelRegistry.models))
    for place in ("somebodys.models:Llama", "somebodys.models:Other"):
        ModelRegistry.register_model(paper_config.model_config.architecture, place)
        names.add(disk_identity(paper_config))
    assert len(names | {before}) == 3


def test_a_setting_that_cannot_be_described_gives_no_name(paper_config: Any) -> None:
    config = copy(paper_config)
    config.additional_config = {"act": lambda: None}
    with pytest.raises(StorageError, match=r"VllmConfig\.additional_config"):
        disk_identity(config)
