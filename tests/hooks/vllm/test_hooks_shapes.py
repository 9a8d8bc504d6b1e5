"""Engines of every shape: advised, with tiers or without, or refused in words before they start."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvgraph.hooks.doctor import command as doctor
from kvgraph.hooks.keys import GROUP_BYTES, key_of, unpack
from kvgraph.hooks.settings import TierSettings
from kvgraph.hooks.tiers.jobs import Answers, WorkerStart
from kvgraph.hooks.vllm import plugin, shapes
from kvgraph.hooks.vllm.connector import KvGraphConnector
from kvgraph.hooks.vllm.patches import own_transfer_config
from kvgraph.hooks.vllm.tiers.store import reason_to_refuse
from kvgraph_bench.paper.paper_engine import Shape, cache_of
from kvgraph_bench.sidecars.sidecar_process import SidecarProcess, wait_until
from paper import begin_load, changed, park, text
from vllm import envs
from vllm.config import KVTransferConfig
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.platforms import current_platform
from vllm.v1 import kv_cache_interface as interface
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs
from vllm.v1.kv_cache_layout import KVCacheLayout

pytestmark = pytest.mark.usefixtures("vllm_loaded")
PARKED = text(6, 1)


# Refusals ---------------------------------------------------------------------------------------


DECLINED = [
    ("cache_config", {"enable_prefix_caching": False}, "prefix caching is off"),
    ("parallel_config", {"distributed_executor_backend": "external_launcher"}, "external launcher"),
]


@pytest.mark.parametrize(("part", "fields", "words"), DECLINED)
def test_declined_in_words(
    paper_config: Any, part: str, fields: dict[str, Any], words: str,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    config = changed(paper_config, part, **fields)
    plugin.attach(config)
    assert config.kv_transfer_config is None
    assert words in caplog.text


def test_pools_of_another_kind_are_declined(paper_config: Any) -> None:
    config = copy.copy(paper_config)
    assert shapes.reason_to_decline(config) is None
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="HiSparseConnector", kv_role="kv_both"
    )
    assert "HiSparse" in str(shapes.reason_to_decline(config))


class LookingAhead(SimpleNamespace):
    """A configuration of a vLLM whose hashes look ahead for a draft model, without a connector."""

    @property
    def num_hash_lookahead_tokens(self) -> int:
        return 0 if self.kv_transfer_config is not None else 1


def deepseek(config: Any, ranks: int) -> None:
    config.model_config.hf_config.architectures = ["DeepseekV41ForCausalLM"]
    object.__setattr__(config.parallel_config, "prefill_context_parallel_size", ranks)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda config: None, None),
        (lambda config: vars(config).update(num_hash_lookahead_tokens=0), None),
        (lambda config: LookingAhead(**vars(config)), "draft model"),
        (lambda config: vars(config).update(additional_config={"decode_backend": "auto"}), None),
        (lambda config: vars(config).update(additional_config={"decode_backend": "fast"}),
         "decode_backend='fast'"),
        (lambda config: deepseek(config, ranks=1), None),
        (lambda config: deepseek(config, ranks=2), "DeepseekV41"),
    ],
)  # fmt: skip
def test_what_vllm_does_without_any_connector_alone_is_left_stock(
    paper_config: Any, change: Any, words: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    config = SimpleNamespace(**vars(copy.deepcopy(paper_config)))
    config.model_config = SimpleNamespace(
        is_attention_free=False, is_encoder_decoder=False,
        architectures=config.model_config.architectures, hf_config=SimpleNamespace(),
    )  # fmt: skip
    config = change(config) or config
    config.model_config.architectures = getattr(
        config.model_config.hf_config, "architectures", config.model_config.architectures
    )
    found = shapes.reason_to_decline(config)
    assert (found is None) if words is None else (words in str(found))
    if words is not None:
        plugin.attach(config)
        assert config.kv_transfer_config is None
        assert caplog.text.count(words) == 1
    config.kv_transfer_config = KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_both")
    assert shapes.reason_to_decline(config) is None, "the user's connector took that already"


def test_a_model_that_only_keeps_states_is_declined(paper_config: Any) -> None:
    model = SimpleNamespace(is_attention_free=True)
    config = SimpleNamespace(cache_config=paper_config.cache_config, model_config=model)
    assert "no layer of this model attends" in str(shapes.reason_to_decline(config))


NO_TIERS = [
    ("parallel_config", {"decode_context_parallel_size": 2}, "context parallelism"),
    ("parallel_config", {"prefill_context_parallel_size": 2}, "context parallelism"),
    ("model_config", {"is_encoder_decoder": False}, None),
]


@pytest.mark.parametrize(("part", "fields", "words"), NO_TIERS)
def test_no_tiers_in_words(
    paper_config: Any, part: str, fields: dict[str, Any], words: str | None,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setenv("AITHER_KVCACHE_WARM_GIB", "1")
    monkeypatch.setenv("AITHER_KVCACHE_SIDECAR", "ipc:///nowhere")
    monkeypatch.setenv("VLLM_CPU_NUM_OF_RESERVED_CPU", "1")
    config = changed(paper_config, part, **fields)
    plugin.attach(config)
    transfer = config.kv_transfer_config
    assert transfer.kv_connector == "KvGraphConnector"
    assert transfer.is_kv_transfer_instance is (words is None)
    assert words is None or words in caplog.text


@pytest.mark.parametrize(("own_process", "refused"), [("1", False), ("0", True)])
def test_an_engine_that_sleeps_in_the_callers_process_has_no_tiers(
    paper_config: Any, own_process: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", own_process)
    envs.disable_envs_cache()
    config = changed(paper_config, "model_config", enable_sleep_mode=True)
    assert ("sleeps" in str(shapes.reason_for_no_tiers(config))) is refused


@pytest.mark.parametrize(("as_given", "refused"), [("0", False), ("1", True)])
def test_an_engine_that_takes_ids_as_clients_give_them_has_no_tiers(
    paper_config: Any, as_given: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", as_given)
    envs.disable_envs_cache()
    assert ("RANDOMIZATION" in str(shapes.reason_for_no_tiers(paper_config))) is refused


def test_an_id_is_not_free_while_its_aborted_request_is_loaded_for(
    paper: Callable[..., Any],
) -> None:
    """Why: stock vLLM forgets a request with its abort, and with a load under way it cannot."""
    engine = paper(Shape())
    park(engine, text(4, 1))
    request = begin_load(engine, text(4, 1))
    engine.abort(request)
    with pytest.raises(AssertionError, match="duplicate request id"):
        engine.scheduler.add_request(engine.make(request.request_id, text(1, 2), 1))


def test_hybrid_models_have_no_tiers() -> None:
    config = SimpleNamespace(
        model_config=SimpleNamespace(is_hybrid=True), kv_transfer_config=None, parallel_config=None
    )
    assert "hybrid" in str(shapes.reason_for_no_tiers(config))


HYBRID = {
    "full attention and windows": (None, 40),
    "windows first": (40, None),
    "windows of two lengths": (None, 20, 70),
    "Mamba and full attention": (0, None),
}


@pytest.mark.parametrize("windows", HYBRID.values(), ids=HYBRID)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_hybrid_engine_is_advised_by_its_full_attention(
    paper: Callable[..., Any], windows: tuple[int | None, ...], asynchronous: bool
) -> None:
    """What its scheduler says, its pool holds, and every group of layers reads its own."""
    shape = Shape(blocks=120, asynchronous=asynchronous, warm=None, windows=windows)
    engine, stock = paper(shape), paper(dataclasses.replace(shape, stock=True))
    group = windows.index(None)
    assert engine.side.group.index == group
    for seed in (1, 2, 1, 3, 1):
        answer = engine.serve(text(6, seed), output=20)  # any wrong read raises
        assert answer == stock.serve(text(6, seed), output=20)
        assert set(unpack(engine.side.resident())) == held(engine, group)
    assert engine.is_whole()


def held(engine: Any, group: int) -> set[int]:
    """Keys that the pool has cached of one group."""
    hashes = [block.block_hash for block in engine.pool.blocks if block.block_hash is not None]
    suffix = group.to_bytes(GROUP_BYTES, "big")
    return {key_of(each[:-GROUP_BYTES]) for each in hashes if each.endswith(suffix)}


@pytest.mark.parametrize("windows", [(40,), (20, 70)])
def test_an_engine_without_full_attention_is_left_alone_in_words(
    paper: Callable[..., Any], windows: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    engine = paper(Shape(blocks=120, warm=None, windows=windows))
    assert engine.side is None
    assert "attends to everything before it (SlidingWindowSpec)" in caplog.text
    assert "cache_full_blocks" not in vars(engine.pool)
    assert len(engine.serve(PARKED, output=5)) == 5


def test_layers_of_several_sizes_with_full_attention_are_full_attention() -> None:
    (full,) = cache_of(Shape()).kv_cache_groups
    (window,) = cache_of(Shape(windows=(40,))).kv_cache_groups

    def together(*specs: Any) -> Any:
        named = {str(number): spec for number, spec in enumerate(specs)}
        return UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=named)

    assert shapes.is_full_attention(together(full.kv_cache_spec, full.kv_cache_spec))
    assert not shapes.is_full_attention(together(window.kv_cache_spec))


def test_a_hybrid_engines_groups_have_no_tiers(paper: Callable[..., Any]) -> None:
    engine = paper(Shape(blocks=120, warm=None, windows=(None, 40)))
    cache, group = cache_of(engine.shape), engine.side.group
    assert "hybrid model with 2" in str(reason_to_refuse(engine.config, cache, group))


def test_ranks_of_a_data_parallel_engine_share_a_sidecar_and_no_advice(
    paper: Callable[..., Any], socket_directory: Path
) -> None:
    """Each rank has a scheduler and a pool of its own: its advice names what that holds."""
    with SidecarProcess(socket_directory, sidecar__interval_s=0.05) as sidecar:
        ranks = [
            paper(Shape(blocks=15, warm=None, rank=(rank, 2)), endpoint=sidecar.endpoint)
            for rank in (0, 1)
        ]
        for number, engine in enumerate(ranks):
            for seed in range(3):
                engine.serve(text(4, 10 * number + seed), output=4)
        for engine in ranks:
            assert wait_until(lambda engine=engine: ranked(engine) == held(engine, 0), 20.0)
        assert not ranked(ranks[0]) & ranked(ranks[1])
        assert len(sidecar.status()["engines"]) == 2


def ranked(engine: Any) -> set[int]:
    ranking = engine.side.client.ranking()
    return set() if ranking is None else set(ranking.order.tolist())


@pytest.mark.parametrize(
    ("more", "ok", "words"),
    [
        ("", True, "tiers where AITHER_KVCACHE_WARM_GIB"),
        ("", True, "one token's KV takes 2,048 B per worker, so that a GiB holds 524,288 tokens"),
        ("--no-enable-prefix-caching", False, "prefix caching is off"),
        ("--no-such-flag", False, "unrecognized arguments: --no-such-flag"),
    ],
)
def test_doctor_says_so_before(tiny_model: Path, more: str, ok: bool, words: str) -> None:
    check = doctor.check_engine(f"{tiny_model} --dtype float32 --max-model-len 256 {more}")
    assert check.ok is ok, check.detail
    assert words in check.detail


# Shapes with everything -------------------------------------------------------------------------

SHAPES = {
    "alone": Shape(),
    "asynchronous": Shape(asynchronous=True),
    "tensor parallel": Shape(workers=4),
    "tensor parallel, asynchronous": Shape(workers=4, asynchronous=True),
    "speculative": Shape(drafts=3),
    "speculative, asynchronous": Shape(drafts=3, asynchronous=True),
    "with a disk": Shape(warm=32, cold=64, workers=2),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_parked_session_comes_back_and_says_what_stock_says(
    paper: Callable[..., Any], shape: Shape
) -> None:
    engine = paper(shape)
    park(engine, PARKED)
    loaded = engine.side.bridge.ledger.counts.loaded
    answer = engine.serve(PARKED, output=20)
    assert engine.side.bridge.ledger.counts.loaded > loaded
    assert engine.is_whole()
    stock = paper(Shape(asynchronous=shape.asynchronous, stock=True))
    assert answer == stock.serve(PARKED, output=20)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_stages_with_uneven_layers_hold_what_the_smallest_can(
    paper: Callable[..., Any], asynchronous: bool
) -> None:
    """61 layers on four stages are 15, 15, 16, 15: the third's memory holds fewer blocks."""
    engine = paper(Shape(workers=4, asynchronous=asynchronous))
    engine.workers[2].answers = Answers(WorkerStart(warm_capacity=40))
    park(engine, PARKED)
    assert engine.side.bridge.ledger.directory.warm_capacity == 40
    assert max(len(worker.copies) for worker in engine.workers) <= 40
    answer = engine.serve(PARKED, output=5)
    assert len(answer) == 5
    assert engine.side.bridge.ledger.counts.spill_failed == 0
    assert engine.is_whole()


def test_a_stage_that_fails_a_block_has_it_computed_on_all(paper: Callable[..., Any]) -> None:
    engine = paper(Shape(workers=4))
    park(engine, PARKED)
    engine.workers[2].failing = lambda job: (1,)
    assert len(engine.serve(PARKED, output=5)) == 5
    assert engine.is_whole()


def test_tenants_adapters_and_images_with_one_prompt_do_not_share(
    paper: Callable[..., Any],
) -> None:
    engine = paper(Shape())
    engine.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=1000)
    engine.scheduler.max_num_encoder_input_tokens = 1000
    adapter = LoRARequest("adapter", 1, "/nowhere/adapter")
    ways: list[dict[str, Any]] = [
        {}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"lora_request": adapter},
        {"mm_features": [image("cat")]}, {"mm_features": [image("dog")]},
    ]  # fmt: skip
    for way in ways:
        park(engine, PARKED, **way)
    answers = [engine.serve(PARKED, output=12, **way) for way in ways]  # any wrong read raises
    assert len({tuple(answer) for answer in answers}) == len(ways)
    assert engine.side.bridge.ledger.counts.loaded


def image(content: str) -> Any:
    """An image at the start of a prompt, as the encoder's cache knows it."""
    place = PlaceholderRange(offset=2, length=20)
    return MultiModalFeatureSpec(
        data=None, modality="image", identifier=content, mm_position=place, mm_hash=content
    )


ENDPOINT = "ipc:///tmp/nobody"
EVERY = ["LBNHC", "LBHNC", "BLHNC"]

Resolve = Callable[..., str]


@pytest.fixture
def resolve(paper_config: Any, monkeypatch: pytest.MonkeyPatch) -> Resolve:
    """vLLM's own choice for an engine on a GPU with our connector, by what its backends read."""
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    monkeypatch.delenv("VLLM_KV_CACHE_LAYOUT", raising=False)

    def resolved(readable: list[str], tiers: bool = True, **cache: Any) -> str:
        fields = {"kv_cache_layout": None, "user_specified_block_size": False, **cache}
        config = changed(paper_config, "cache_config", **fields)
        settings = TierSettings(1 << 30) if tiers else None
        config.kv_transfer_config = own_transfer_config(ENDPOINT, settings)
        return str(resolve_kv_cache_layout(config, [readable]).name)

    return resolved


@pytest.mark.parametrize(
    ("readable", "cache", "order"),
    [
        (EVERY, {}, "BLHNC"),
        (EVERY, {"tiers": False}, "LBNHC"),
        (["LBNHC"], {}, "LBNHC"),
        (EVERY, {"user_specified_block_size": True}, "LBNHC"),
        (EVERY, {"kv_cache_dtype_skip_layers": ["0"]}, "LBNHC"),
    ],
    ids=["tiers", "no tiers", "not readable", "may be split by the user", "may be split by layer"],
)
def test_with_tiers_a_block_is_one_run_where_it_can_be(
    resolve: Resolve, readable: list[str], cache: dict[str, Any], order: str
) -> None:
    assert resolve(readable, **cache) == order


def test_what_the_user_chose_is_kept(resolve: Resolve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "HND")
    assert resolve(EVERY) == "LBHNC"


def test_vllm_cannot_split_blocks_in_that_order() -> None:
    """Why it is not always asked for: an engine would end where it runs without us."""
    spec = interface.FullAttentionSpec(
        block_size=128, num_kv_heads=2, head_size=32, dtype=torch.bfloat16
    )
    strides = interface.compute_layout_strides(spec, 4, 3, KVCacheLayout.BLHNC)
    size = spec.page_size_bytes * 4 * 3
    where = interface.KVCacheTensor(
        size=size, layers=["a", "b", "c"], layer_stride=strides[0], block_stride=strides[1]
    )
    raw = torch.zeros(size, dtype=torch.int8)
    with pytest.raises(ValueError, match="cannot be split"):
        interface.create_kv_cache_views(raw, spec, 4, KVCacheLayout.BLHNC, where, 64)


def test_a_cpu_whose_order_is_fixed_or_that_is_not_known_is_not_asked(paper_config: Any) -> None:
    config = copy.copy(paper_config)
    config.kv_transfer_config = own_transfer_config(ENDPOINT, TierSettings(1 << 30))
    for each in (config, object()):
        assert KvGraphConnector.get_required_kvcache_layout(each) is None
