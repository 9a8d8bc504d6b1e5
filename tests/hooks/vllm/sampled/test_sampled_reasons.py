"""Engines whose steps cannot be sampled are told why, before they start and when they do."""

from __future__ import annotations

import copy
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from kvgraph.hooks.doctor import command as doctor
from kvgraph.hooks.vllm import shapes
from kvgraph.hooks.vllm.installed import live_misfits
from kvgraph.hooks.vllm.relied_on import Part
from kvgraph.hooks.vllm.sampled import attach
from paper import changed
from vllm.config import KVTransferConfig

pytestmark = pytest.mark.usefixtures("vllm_loaded")


def on_a(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    from vllm.platforms import current_platform

    assert live_misfits(Part.SAMPLING) == [], "and all of vLLM is loaded as on a CPU"
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: kind == "cpu")
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: kind == "cuda")


REFUSED = [
    ("parallel_config", {"world_size": 2}, "several workers"),
    ("parallel_config", {"data_parallel_size": 2}, "data-parallel ranks"),
]


@pytest.mark.parametrize(("part", "fields", "words"), REFUSED)
def test_an_engine_on_a_gpu_is_refused_in_words(
    paper_config: Any, part: str, fields: dict[str, Any], words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    on_a(monkeypatch, "cuda")
    assert shapes.reason_for_no_samples(paper_config) is None
    assert words in str(shapes.reason_for_no_samples(changed(paper_config, part, **fields)))


def test_ranks_on_cpus_have_no_graphs_to_agree_on(
    paper_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a(monkeypatch, "cpu")
    config = changed(paper_config, "parallel_config", data_parallel_size=2)
    assert shapes.reason_for_no_samples(config) is None


def test_other_hardware_and_other_connectors_are_named(
    paper_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = copy.copy(paper_config)
    config.kv_transfer_config = KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_both")
    assert "NixlConnector" in str(shapes.reason_for_no_samples(config))
    config = copy.copy(paper_config)
    config.speculative_config = SimpleNamespace()
    assert "speculative" in str(shapes.reason_for_no_samples(config))
    made = copy.copy(paper_config)
    made.model_config = SimpleNamespace(use_mla=True)
    assert "MLA" in str(shapes.reason_for_no_samples(made))
    on_a(monkeypatch, "rocm")
    assert "CUDA" in str(shapes.reason_for_no_samples(paper_config))


def test_the_doctor_says_why_an_engine_would_not_be_sampled(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = f"{tiny_model} --tensor-parallel-size 2 --distributed-executor-backend mp"
    monkeypatch.setenv("AITHER_KVCACHE_SAMPLING", "1")
    assert "; no sampling: an engine with several workers" in doctor.check_engine(arguments).detail
    monkeypatch.setenv("AITHER_KVCACHE_SAMPLING", "0")
    assert "sampling" not in doctor.check_engine(arguments).detail


# Runners ----------------------------------------------------------------------------------------


def layer(backend: str = "FLASH_ATTN", **fields: Any) -> Any:
    impl = SimpleNamespace(**{"alibi_slopes": None, "logits_soft_cap": 0, **fields})
    found = SimpleNamespace(get_name=lambda: backend)
    return SimpleNamespace(
        get_attn_backend=lambda: found, impl=impl, sliding_window=fields.get("window")
    )


def runner(config: Any, found: Any, spec: Any = None, groups: int = 1) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    made = copy.copy(config)
    made.kv_transfer_config = KVTransferConfig(kv_connector="KvGraphConnector", kv_role="kv_both")
    made.compilation_config = SimpleNamespace(static_forward_context={"a": found})
    spec = spec or FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.half)
    cache = KVCacheConfig(
        num_blocks=4, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["a"], spec)] * groups
    )
    return SimpleNamespace(
        model_runner=SimpleNamespace(vllm_config=made, kv_cache_config=cache), block_size=16
    )


@pytest.mark.parametrize("backend", ["CPU_ATTN", "FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"])
def test_backends_whose_cache_is_described_are_accepted(paper_config: Any, backend: str) -> None:
    assert attach.reason_not_to_sample(runner(paper_config, layer(backend))) is None


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (layer("FLEX_ATTENTION"), "FLEX_ATTENTION keeps its cache in a way that is not known"),
        (layer(window=1024), "sliding window"),
        (layer(alibi_slopes=[0.5]), "ALiBi"),
        (layer(logits_soft_cap=50.0), "caps its logits"),
    ],
)
def test_layers_that_cannot_be_measured_are_refused_by_name(
    paper_config: Any, found: Any, words: str
) -> None:
    assert words in str(attach.reason_not_to_sample(runner(paper_config, found)))


def test_caches_of_other_kinds_are_refused(paper_config: Any) -> None:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    window = SlidingWindowSpec(
        block_size=16, num_kv_heads=2, head_size=64, dtype=torch.half, sliding_window=64
    )
    chunks = FullAttentionSpec(
        block_size=16, num_kv_heads=2, head_size=64, dtype=torch.half, attention_chunk_size=64
    )
    two = runner(paper_config, layer(), groups=2)
    for made in (two, *(runner(paper_config, layer(), each) for each in (window, chunks))):
        assert "layers all have full attention" in str(attach.reason_not_to_sample(made))


def test_a_profiling_run_is_not_sampled_and_a_refusal_is_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm.v1.worker import gpu_model_runner
    from vllm.v1.worker.gpu import model_runner as second

    called: list[tuple[str, bool]] = []
    for module in (gpu_model_runner, second):
        name = module.__name__

        def stock(self: Any, config: Any, is_profiling: bool = False, *, at: str = name) -> None:
            called.append((at, is_profiling))

        monkeypatch.setattr(module.GPUModelRunner, "initialize_kv_cache", stock)
    monkeypatch.setenv("AITHER_KVCACHE_SAMPLING", "1")
    attach.follow_runners()
    with caplog.at_level(logging.WARNING):
        for module in (gpu_model_runner, second):
            made = module.GPUModelRunner.__new__(module.GPUModelRunner)
            made.initialize_kv_cache(None, True)
            assert not caplog.messages
            made.initialize_kv_cache(None)
            assert len([m for m in caplog.messages if "no decode step is sampled" in m]) == 1
            caplog.clear()
    assert [profiling for _, profiling in called] == [True, False, True, False]
