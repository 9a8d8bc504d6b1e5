"""Sampled steps: who can have them, what they cost, what is read off them and told."""

from __future__ import annotations

import copy
import random
from itertools import pairwise
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvgraph.hooks.doctor import command as doctor
from kvgraph.hooks.tiers.jobs import TierAnswer
from kvgraph.hooks.vllm import shapes
from kvgraph.hooks.vllm.relied_on import Part
from kvgraph.hooks.vllm.sampled import attach
from kvgraph.hooks.vllm.sampled.measuring import (
    BlockEmbedder,
    LayerQuery,
    Sample,
    SampledMetadata,
    attended,
    confidence_scores,
    split_samples,
)
from kvgraph.hooks.vllm.sampled.sampler import LONGEST_S, SamplingBudget, StepTimes
from kvgraph.hooks.vllm.tiers.worker import TierWorkerMetadata
from kvgraph.hooks.vllm.versions import live_misfits
from kvgraph.kernels import layout_engines
from kvgraph.kernels.backends.attention import confidence_score
from kvgraph.kernels.backends.base import block_meanings
from kvgraph.kernels.layout import PagedKv
from kvgraph.kernels.rope import Rope
from made_runner import SIZES, scheduled
from paper import changed
from vllm.config import KVTransferConfig
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu import model_runner as second

pytestmark = pytest.mark.usefixtures("vllm_loaded")


def on_a(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
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
    called: list[tuple[str, bool]] = []
    for module in (gpu_model_runner, second):
        name = module.__name__

        def stock(self: Any, config: Any, is_profiling: bool = False, *, at: str = name) -> None:
            called.append((at, is_profiling))

        monkeypatch.setattr(module.GPUModelRunner, "initialize_kv_cache", stock)
    monkeypatch.setenv("AITHER_KVCACHE_SAMPLING", "1")
    attach.follow_runners()
    for module in (gpu_model_runner, second):
        made = module.GPUModelRunner.__new__(module.GPUModelRunner)
        made.initialize_kv_cache(None, True)
        assert not caplog.messages
        made.initialize_kv_cache(None)
        assert len([m for m in caplog.messages if "no decode step is sampled" in m]) == 1
        caplog.clear()
    assert [profiling for _, profiling in called] == [True, False, True, False]


SHARE = 0.002


class Engine:
    """Steps on one core; a plain sample costs ``plain_s``, a layer ``each_s`` per token."""

    def __init__(
        self, plain_s: float, each_s: float, tokens: int, step_s: float = 0.005,
        strict: bool = False,
    ) -> None:  # fmt: skip
        self.now = self.cpu = self.sampled_s = 0.0
        self.plain_s, self.each_s, self.tokens = plain_s, each_s, tokens
        self.times: list[float] = []
        self.layers = 0
        self.step_s = step_s
        self.budget = SamplingBudget(lambda: self.now, lambda: self.cpu, SHARE, strict)

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += self.step_s
            self.cpu += self.step_s
            if self.budget.is_due():
                self._sample()

    def _sample(self) -> None:
        layers = self.budget.layers(self.tokens, 16)
        cost = self.plain_s + self.each_s * layers * self.tokens
        self.now += cost
        self.cpu += cost
        self.sampled_s += cost
        self.layers += layers
        self.times.append(self.now)
        self.budget.took(cost, layers, self.tokens)


def test_samples_take_their_share_and_no_more() -> None:
    for tokens in (100, 1_000, 20_000):
        engine = Engine(2e-4, 1e-6, tokens)
        engine.run(300.0)
        assert engine.sampled_s <= 1.1 * SHARE * engine.cpu, tokens
        assert engine.layers > 0


def test_one_sample_that_was_held_up_does_not_end_the_sampling_of_layers() -> None:
    engine = Engine(2e-4, 1e-6, 500)
    engine.run(30.0)
    engine.budget.took(5.0, 4, 500)
    before = engine.layers
    engine.run(3_000.0)
    assert engine.layers > before + 100


@pytest.mark.parametrize("step_s", [0.002, 0.005, 0.03, 0.07, 0.2])
def test_a_second_has_one_sampled_step_however_long_steps_are(step_s: float) -> None:
    engine = Engine(2.5e-3, 1e-4, 50_000, step_s)
    engine.run(300.0)
    assert len(engine.times) >= 300
    assert engine.sampled_s <= 300 * 3e-3 + 16 * 5.0, "though that is more than its share"
    gaps = [late - early for early, late in pairwise(engine.times)]
    assert max(gaps) <= LONGEST_S + step_s


def test_a_pause_is_not_made_up_for() -> None:
    engine = Engine(2.5e-3, 1e-4, 50_000)
    engine.run(10.0)
    engine.now += 60.0
    before = len(engine.times)
    engine.run(10.0)
    assert len(engine.times) - before <= 12


@pytest.mark.parametrize("cost_s", [2e-4, 4e-3, 0.03, 0.4])
@pytest.mark.parametrize("each_s", [0.0, 1e-8, 1e-6])
def test_a_strict_budget_never_spends_more_than_its_share_and_the_sample_it_learns_from(
    cost_s: float, each_s: float
) -> None:
    engine = Engine(cost_s, each_s, 10_000, 0.05, strict=True)
    for _ in range(60):
        engine.run(50.0)
        dearest = cost_s + 16 * each_s * 10_000
        assert engine.sampled_s <= SHARE * engine.cpu + dearest
    assert engine.times
    assert engine.sampled_s >= 0.5 * SHARE * engine.cpu - dearest


def test_a_strict_budget_tries_again_where_samples_become_cheap() -> None:
    engine = Engine(0.4, 0.0, 1_000, 0.05, strict=True)
    engine.run(1_000.0)
    engine.plain_s, before = 1e-3, len(engine.times)
    engine.run(10_000.0)
    assert len(engine.times) > before + 1_000


def test_layers_that_cost_far_more_than_was_guessed_are_taken_twice_and_then_saved_for() -> None:
    engine = Engine(7e-4, 3e-5, 300)
    engine.run(60.0)
    cost = 7e-4 + 16 * 3e-5 * 300
    assert engine.sampled_s <= SHARE * engine.cpu + 2 * cost
    engine.run(600.0)
    assert engine.sampled_s <= SHARE * engine.cpu + 2 * cost
    left = SHARE * engine.cpu - 7e-4 * len(engine.times)
    assert engine.layers * 3e-5 * 300 >= 0.9 * left, "all that confidence leaves is for layers"


LAYERS, BLOCKS, HEADS, TOKENS, DIMS = 2, 48, 2, 32, 32
ROPE = Rope(1e4 ** -(torch.arange(DIMS // 2, dtype=torch.float64) * 2 / DIMS))


def cache() -> PagedKv:
    torch.manual_seed(1)
    memory = torch.randn(LAYERS, BLOCKS, HEADS, TOKENS, 2 * DIMS)
    return layout_engines.from_views(
        [memory[n] for n in range(LAYERS)], isa="vec", mla=False, tokens=TOKENS
    )


def write(kv: PagedKv, block: int, keys: torch.Tensor) -> None:
    """Keys [heads, tokens, dims] of a block, in all layers, as the CPU backend stores them."""
    view = kv.memory.view(LAYERS, BLOCKS, HEADS, 2 * DIMS * TOKENS)
    view[:, block, :, : DIMS * TOKENS] = keys.transpose(1, 2).reshape(HEADS, -1)


def rotated(keys: torch.Tensor, place: int) -> torch.Tensor:
    positions = place * TOKENS + torch.arange(TOKENS)
    return ROPE.rotate(keys.transpose(0, 1), *ROPE.rotation(positions)).transpose(0, 1)


def test_equal_text_has_one_meaning_wherever_it_stands() -> None:
    kv, plain = cache(), torch.randn(HEADS, TOKENS, DIMS)
    write(kv, 3, rotated(plain, 0))
    write(kv, 40, rotated(plain, 9))
    blocks, places = torch.tensor([3, 40]), torch.tensor([0, 9])
    first, second = block_meanings(kv, 1, blocks, places, ROPE)
    assert torch.allclose(first, plain.mean(1).reshape(-1), atol=1e-4)
    assert torch.allclose(first, second, atol=1e-4)


def test_attention_is_averaged_over_layers_and_sums_to_one() -> None:
    kv, blocks = cache(), torch.tensor([5, 1, 30])
    looks = [LayerQuery(layer, torch.randn(4, DIMS), DIMS**-0.5) for layer in range(LAYERS)]
    mass = attended(kv, looks, blocks, 2 * TOKENS + 5)
    alone = [attended(kv, [look], blocks, 2 * TOKENS + 5) for look in looks]
    assert torch.allclose(mass, (alone[0] + alone[1]) / 2)
    assert abs(float(mass.sum()) - 1) < 1e-5


class Embedder:
    """One that looks at the same blocks in every step, and reads back at once."""

    def __init__(self) -> None:
        self.meanings = BlockEmbedder(cache(), ROPE)
        self.blocks, self.mass = torch.arange(BLOCKS), torch.rand(BLOCKS)

    def told_of(self, request: str, most: int = BLOCKS) -> tuple[tuple[int, ...], Any] | None:
        chosen = self.meanings.choose(request, self.blocks[:most], self.mass[:most])
        return None if chosen is None else self.meanings.report(request, *chosen)


@pytest.fixture
def embedder() -> Embedder:
    """One that knows what all blocks share."""
    embedder = Embedder()
    for turn in range(8):
        embedder.told_of(f"r{turn}")
    return embedder


def test_nothing_is_told_before_it_is_known_what_all_blocks_share() -> None:
    embedder = Embedder()
    mass, told = embedder.mass, [embedder.told_of(f"r{turn}") for turn in range(12)]
    assert [places for places, _ in told[:8]] == [()] * 8
    places, vectors = told[8]
    assert len(places) == 4
    assert vectors.shape == (4, HEADS * DIMS)
    assert mass[list(places)].min() >= mass.sort(descending=True).values[3]


def test_a_block_is_embedded_once_per_request(embedder: Embedder) -> None:
    (first, _), (second, _) = embedder.told_of("mine"), embedder.told_of("mine")
    assert first
    assert not set(first) & set(second)


def test_a_request_whose_blocks_are_all_told_has_no_more_to_embed(embedder: Embedder) -> None:
    places: list[int] = []
    while (told := embedder.told_of("mine", most=6)) is not None:
        places += told[0]
    assert sorted(places) == list(range(6))


def test_rows_of_logits_are_taken_in_the_order_that_is_asked_for() -> None:
    kv, logits = cache(), torch.randn(11, 9_000)
    alone = [float(confidence_score(row[None])[0]) for row in logits]
    sure = confidence_scores(kv, logits, [slice(7, 11), slice(0, 4)])
    assert sure.tolist() == pytest.approx([*alone[7:], *alone[:4]], abs=1e-6)


STEP_S = 0.01


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.times = StepTimes(lambda: self.now, SIZES)

    def decode(self, requests: int, *seconds: float) -> None:
        """Steps that begin, each followed by its time."""
        for each in seconds:
            self.times.begin(scheduled({f"r{n}": 1 for n in range(requests)}))
            self.now += each


def test_it_can_be_told_once_steps_of_that_size_were_timed() -> None:
    clock = Clock()
    clock.decode(3, *[STEP_S] * 8)
    assert not clock.times.can_tell
    clock.decode(3, STEP_S)
    assert clock.times.can_tell
    clock.decode(4, STEP_S)
    assert clock.times.can_tell, "three are padded to four"
    clock.decode(5, STEP_S)
    assert not clock.times.can_tell


@pytest.mark.parametrize("late", [(0.03, 0.0, 0.0), (0.0, 0.03, 0.0), (0.01, 0.01, 0.01)])
def test_all_that_a_sampled_step_holds_up_is_its_cost(late: tuple[float, ...]) -> None:
    clock = Clock()
    clock.decode(2, *[STEP_S] * 12)
    clock.decode(2, 0.0)
    clock.times.sampling()
    clock.now += STEP_S + late[0]
    assert clock.times.settled(1.0) is None
    clock.decode(2, *[STEP_S + each for each in late[1:]])
    assert not clock.times.can_tell, "one at a time"
    clock.decode(2, STEP_S)
    assert clock.times.settled(1.0) == pytest.approx(0.03)
    assert clock.times.settled(1.0) is None
    assert clock.times.can_tell


def test_a_cost_that_cannot_be_told_is_what_was_expected_at_least() -> None:
    clock = Clock()
    clock.decode(2, *[STEP_S] * 12)
    clock.times.sampling()
    clock.times.begin(scheduled({"r0": 1, "new": 500}, new=True))
    clock.now += 3.0
    assert clock.times.settled(0.02) == pytest.approx(0.02)


def test_what_passes_without_work_counts_for_nothing() -> None:
    clock = Clock()
    clock.decode(2, *[STEP_S] * 12)
    before = clock.times.busy()
    clock.now += 100.0
    clock.times.begin(scheduled({"new": 64}, new=True))
    clock.now += STEP_S
    clock.times.begin(scheduled({"new": 1}))
    assert clock.times.busy() == pytest.approx(before)


def test_steps_that_vary_are_held_against_their_median() -> None:
    rng, clock = random.Random(3), Clock()
    steps = [STEP_S * rng.uniform(0.8, 1.2) for _ in range(40)]
    clock.decode(2, *steps)
    clock.times.begin(scheduled({"r0": 1, "r1": 1}))
    clock.times.sampling()
    clock.now += 0.05
    clock.decode(2, STEP_S, STEP_S)
    clock.times.begin(scheduled({"r0": 1, "r1": 1}))
    usual = median(steps[-32:])
    assert clock.times.settled(0.0) == pytest.approx(0.05 + 2 * STEP_S - 3 * usual)


FIRST, SECOND = Sample("a", 0.5), Sample("b", 0.25)


@pytest.mark.parametrize("theirs_too", [False, True])
def test_samples_and_answers_of_two_workers_are_put_together(theirs_too: bool) -> None:
    other = SampledMetadata([SECOND], TierWorkerMetadata(TierAnswer()) if theirs_too else None)
    both = SampledMetadata([FIRST], TierWorkerMetadata(TierAnswer())).aggregate(other)
    answer, samples = split_samples(both)
    assert samples == [FIRST, SECOND]
    assert isinstance(answer, TierWorkerMetadata)
