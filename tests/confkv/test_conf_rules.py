"""What the cache's parts promise each by itself: scores, budgets, victims."""

from __future__ import annotations

import shutil
from typing import Any

import kvgraph
import pytest
import torch
from kvgraph.hooks.confkv.layer import AttentionAndRecency, TokenTable, survivors
from kvgraph.hooks.confkv.settings import ConfKVSettings, SettingsError, layer_shares
from kvgraph.kernels.backends import mixed
from kvgraph.kernels.backends.attention import (
    confidence,
    confidence_score,
    host_confidence,
    score_of,
)
from kvgraph.kernels.backends.mixed import KvPart, mixed_attention, observed_mass
from kvgraph.kernels.quant import channel_scale, from_cells, rescaled, to_cells
from kvgraph_bench.confkv.confkv_arms import STATIC, follow
from random_models import Replayed, random_model

INF = float("inf")


@pytest.fixture
def llama() -> Any:
    return random_model("llama")


@pytest.fixture
def prompt() -> torch.Tensor:
    return torch.randint(1, 97, (2, 20), generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("score", [confidence_score, lambda rows: score_of(host_confidence(rows))])
def test_scores_are_bounded_whatever_the_logits(score: Any) -> None:
    one_hot = torch.full((1, 50), -INF)
    one_hot[0, 7] = 3.0
    two = one_hot.clone()
    two[0, 8] = 3.0
    nothing, unknown = torch.full((1, 50), -INF), torch.full((1, 50), float("nan"))
    rows = torch.cat([one_hot, torch.zeros(1, 50), nothing, unknown, two, one_hot * 1e4])
    sure, uniform, none, nan, pair, huge = score(rows).tolist()
    assert sure == pytest.approx(1.0)
    assert huge == pytest.approx(1.0)
    assert uniform == pytest.approx(0.02 * 0.5, abs=1e-3)
    assert none == 0.0
    assert nan == 0.0
    assert uniform < pair < sure


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocabulary", [2, 500, 70_001])
def test_one_thread_finds_what_torch_does(dtype: torch.dtype, vocabulary: int) -> None:
    logits = (torch.randn(3, vocabulary) * 4).to(dtype)
    for mine, theirs in zip(host_confidence(logits), confidence(logits), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-5)


def test_sharper_logits_score_higher() -> None:
    logits = torch.randn(200, generator=torch.Generator().manual_seed(1))
    scores = confidence_score(torch.stack([logits * heat for heat in (0.0, 0.5, 1, 2, 4, 8)]))
    assert scores.tolist() == sorted(scores.tolist())
    assert ((scores >= 0) & (scores <= 1)).all()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"tau": 1.5}, "tau = 1.5; allowed: 0.0 to 1.0"),
        ({"low": 70}, "low = 70; allowed: whole numbers, 80 and more"),
        ({"high": 100}, "high = 100; allowed: whole numbers, 128 and more"),
        ({"gamma": 1.0}, "gamma = 1.0"),
        ({"window": 0}, "window = 0"),
        ({"window": 200}, r"low = 128; allowed: whole numbers, 216 and more \(window \+ slack\)"),
        ({"low": 600}, r"high = 512; allowed: whole numbers, 600 and more \(low\)"),
        ({"tau": "high"}, "tau = 'high'; allowed: 0.0 to 1.0"),
        ({"low": 128.5}, "low = 128.5; allowed: whole numbers"),
        ({"int8": "no"}, "int8 = 'no'; allowed: True or False"),
    ],
)
def test_settings_without_sense_are_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        ConfKVSettings(**values)


def test_arguments_in_the_wrong_place_are_named(llama: Any) -> None:
    with pytest.raises(SettingsError, match=r"LlamaForCausalLM; pass model\.config"):
        kvgraph.ConfKVCache(llama)
    with pytest.raises(kvgraph.KvGraphError, match="settings is a dict; allowed: ConfKVSettings"):
        kvgraph.ConfKVCache(llama.config, {"low": 100})


def test_a_pyramid_falls_with_depth_and_keeps_the_sum(llama: Any, prompt: torch.Tensor) -> None:
    for layers in (1, 2, 5, 30):
        shares = layer_shares(layers, 0.4)
        assert sum(shares) == pytest.approx(layers)
        assert shares == sorted(shares, reverse=True)
    settings = ConfKVSettings(tau=0.0, low=40, high=60, window=8, slack=4, pyramid=0.5)
    cache = kvgraph.ConfKVCache(llama.config, settings)
    with torch.no_grad():
        llama(prompt.repeat(1, 5), past_key_values=cache)
    assert cache.held() == [60, 40, 20]
    with pytest.raises(SettingsError, match=r"pyramid = 0\.8 leaves the last layer 8 tokens"):
        kvgraph.ConfKVCache(llama.config, ConfKVSettings(low=40, window=8, slack=4, pyramid=0.8))


class Hostile:
    """Scores that would evict the newest."""

    queries = 8

    def first(self, mass: torch.Tensor) -> torch.Tensor:
        return mass.mean(1)

    def next(self, memory: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
        return memory

    def scores(
        self, memory: torch.Tensor, position: torch.Tensor, open_to: torch.Tensor
    ) -> torch.Tensor:
        return -position.to(torch.float32)


@pytest.mark.parametrize("int8", [False, True])
def test_the_newest_survive_any_score(llama: Any, prompt: torch.Tensor, int8: bool) -> None:
    settings = ConfKVSettings(tau=0.0, low=24, high=40, window=8, slack=4, int8=int8)
    cache = kvgraph.ConfKVCache(llama.config, settings, ranker=Hostile())
    kept = []
    for _ in range(60):
        with torch.no_grad():
            llama(prompt[:, :1], past_key_values=cache)
        kept.append(cache.layers[2].table.position[0].tolist())
    for step, positions in enumerate(kept):
        newest = list(range(max(0, step - 7), step + 1))
        assert positions[-len(newest) :] == newest
    assert kept[-1][:10] == list(range(10))  # and of the rest the hostile choice: the oldest


def test_the_same_schedule_evicts_the_same(llama: Any, prompt: torch.Tensor) -> None:
    def run(budgets: Replayed | None) -> tuple[Any, list[list[int]]]:
        settings = ConfKVSettings(tau=0.02, low=24, high=40, window=8, slack=4)
        cache = kvgraph.ConfKVCache(llama.config, settings, budgets=budgets)
        llama.generate(prompt, past_key_values=cache, max_new_tokens=80, do_sample=False,
                       pad_token_id=0)  # fmt: skip
        return cache, [layer.table.position.tolist() for layer in cache.layers]

    first, kept = run(None)
    assert {budget for step in first.schedule() for budget in step} == {24, 40}
    again, kept_again = run(Replayed(first.schedule()))
    assert kept_again == kept
    assert again.schedule() == first.schedule()


def test_attention_and_recency_are_weighed_over_what_may_go() -> None:
    ranker = AttentionAndRecency(alpha=0.5, gamma=0.9)
    memory = torch.tensor([[9.0, 0.1, 0.3, 0.2]])
    position = torch.tensor([[0, 10, 20, 30]])
    open_to = torch.tensor([[False, True, True, True]])
    scores = ranker.scores(memory, position, open_to)[0, 1:]
    torch.testing.assert_close(scores, torch.tensor([0.0, 0.75, 0.75]))


def test_the_moving_average_follows_what_is_looked_at() -> None:
    ranker = AttentionAndRecency(alpha=1.0, gamma=0.5)
    memory = ranker.first(torch.tensor([[[0.2, 0.8], [0.6, 0.4]]]))
    torch.testing.assert_close(memory, torch.tensor([[0.4, 0.6]]))
    memory = ranker.next(memory, torch.tensor([[1.0, 0.0]]))
    torch.testing.assert_close(memory, torch.tensor([[0.7, 0.3]]))


def test_nobody_goes_who_is_within_the_budget() -> None:
    table = TokenTable(1, torch.device("cpu"))
    table.append(16, None)
    ranker = AttentionAndRecency(alpha=0.0, gamma=0.9)
    assert survivors(table, [16], 4, ranker) is None
    table.append(5, None)
    chosen = survivors(table, [16], 4, ranker)
    assert chosen.slots.tolist() == [list(range(5, 21))]


def test_all_rows_are_cut_at_once_to_the_lowest_budget_of_the_last_steps(llama: Any) -> None:
    settings = ConfKVSettings(low=12, high=40, window=8, slack=4)
    schedule = [[40, 40]] * 21 + [[12, 40], [40, 40], [40, 12], [40, 40]] + [[40, 40]] * 8
    cache = kvgraph.ConfKVCache(llama.config, settings, budgets=Replayed(schedule))
    valid = []
    for _ in schedule:
        with torch.no_grad():
            llama(torch.ones((2, 1), dtype=torch.int64), past_key_values=cache)
        valid.append(list(cache.layers[0].table.valid))
    assert valid[22] == [23, 23]  # one row was to have 12, and waits
    assert valid[23] == [12, 12]  # the 24th step: both are cut
    assert valid[24:] == [[12 + more, 12 + more] for more in range(1, 10)]


def test_what_was_decided_before_a_prompt_does_not_cut_it(llama: Any) -> None:
    settings = ConfKVSettings(low=12, high=40, window=8, slack=4)
    schedule = [[40], [12], [40], [40]]
    cache = kvgraph.ConfKVCache(llama.config, settings, budgets=Replayed(schedule))
    for tokens in (5, 1, 20, 1):
        with torch.no_grad():
            llama(torch.ones((1, tokens), dtype=torch.int64), past_key_values=cache)
    assert cache.layers[0].table.valid == [27]


def test_a_row_that_keeps_fewer_has_empty_slots_in_front() -> None:
    table = TokenTable(2, torch.device("cpu"))
    table.append(30, None)
    chosen = survivors(table, [30, 10], 4, AttentionAndRecency(alpha=0.0, gamma=0.9))
    assert chosen is not None
    table.keep(*chosen)
    assert table.valid == [30, 10]
    assert table.position[1, -10:].tolist() == list(range(20, 30))
    assert (table.position[1, :20] == -1).all()
    assert not table.full


BATCH, HEADS, KV_HEADS, DIMS = 2, 6, 2, 16


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def dense(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole matrix at once, in double precision."""
    keys, values = (x.double().repeat_interleave(HEADS // KV_HEADS, 1) for x in (keys, values))
    logits = queries.double() @ keys.mT * DIMS**-0.5
    if visible is not None:
        logits = logits.masked_fill(~visible[:, None], -torch.inf)
    weights = logits.softmax(-1)
    return (weights @ values).float(), weights.mean(1).float()


@pytest.mark.parametrize("tile", [1, 7, 64, 1000])
@pytest.mark.parametrize("count", [1, 5])
def test_tiles_give_what_the_dense_matrix_gives(tile: int, count: int) -> None:
    tokens = 100
    queries = drawn(BATCH, HEADS, count, DIMS, seed=1)
    keys, values = (drawn(BATCH, KV_HEADS, tokens, DIMS, seed=n) for n in (2, 3))
    visible = drawn(BATCH, count, tokens, seed=4) > 0
    parts = [KvPart(keys[:, :, :33], values[:, :, :33]), KvPart(keys[:, :, 33:], values[:, :, 33:])]
    for seen in (visible, None):
        found = mixed_attention(queries, parts, seen, DIMS**-0.5, tile)
        output, mass = dense(queries, keys, values, seen)
        torch.testing.assert_close(found.output, output)
        torch.testing.assert_close(found.mass, mass)
        torch.testing.assert_close(observed_mass(queries, keys, seen, DIMS**-0.5), mass)


def test_an_int8_part_is_read_as_its_floats() -> None:
    queries = drawn(BATCH, HEADS, 1, DIMS, seed=1)
    keys, values = (drawn(BATCH, KV_HEADS, 90, DIMS, seed=n) for n in (2, 3))
    scales = channel_scale(keys[:, :, :50]), channel_scale(values[:, :, :50])
    cells = [to_cells(x[:, :, :50], s) for x, s in zip((keys, values), scales, strict=True)]
    parts = [KvPart(*cells, *scales), KvPart(keys[:, :, 50:], values[:, :, 50:])]
    read = [
        torch.cat([from_cells(c, s), x[:, :, 50:]], 2)
        for c, s, x in zip(cells, scales, (keys, values), strict=True)
    ]
    found = mixed_attention(queries, parts, None, DIMS**-0.5, 16)
    output, mass = dense(queries, read[0], read[1], None)
    torch.testing.assert_close(found.output, output)
    torch.testing.assert_close(found.mass, mass)


def test_a_query_that_sees_nothing_reads_zeros() -> None:
    queries = drawn(1, HEADS, 2, DIMS, seed=1)
    keys = drawn(1, KV_HEADS, 20, DIMS, seed=2)
    visible = torch.zeros(1, 2, 20, dtype=torch.bool)
    visible[:, 1] = True
    found = mixed_attention(queries, [KvPart(keys, keys)], visible, 0.25, 8)
    assert not found.output[:, :, 0].any()
    assert not found.mass[:, 0].any()
    assert found.mass[:, 1].sum().item() == pytest.approx(1.0, abs=1e-5)


def test_int8_is_off_by_half_a_step_at_most() -> None:
    values = drawn(BATCH, KV_HEADS, 200, DIMS, seed=5) * drawn(1, KV_HEADS, 1, DIMS, seed=6).exp()
    scale = channel_scale(values)
    error = (from_cells(to_cells(values, scale), scale) - values).abs()
    assert (error <= scale[:, :, None] * 0.5001).all()


def test_a_channel_of_zeros_stays_zero() -> None:
    zeros = torch.zeros(1, 1, 4, 2)
    assert not from_cells(to_cells(zeros, channel_scale(zeros)), channel_scale(zeros)).any()


def test_a_scale_that_does_not_change_keeps_its_cells() -> None:
    values = drawn(1, KV_HEADS, 50, DIMS, seed=7)
    scale = channel_scale(values)
    wider = scale.clone()
    wider[:, 0] *= 1.7
    cells = to_cells(values, scale)
    anew = rescaled(cells, scale, wider)
    assert torch.equal(anew[:, 1], cells[:, 1])
    assert not torch.equal(anew[:, 0], cells[:, 0])


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dims", [16, 40, 64])
def test_the_compiled_path_says_what_the_reference_says(dims: int, int8: bool) -> None:
    if shutil.which("g++") is None:
        pytest.skip("no compiler")
    queries = drawn(BATCH, HEADS, 1, dims, seed=1)
    keys, values = (drawn(BATCH, KV_HEADS, 90, dims, seed=n) for n in (2, 3))
    scales = channel_scale(keys[:, :, :50]), channel_scale(values[:, :, :50])
    cells = [to_cells(x[:, :, :50], s) for x, s in zip((keys, values), scales, strict=True)]
    old = KvPart(*cells, *scales) if int8 else KvPart(keys[:, :, :50], values[:, :, :50])
    parts = [old, KvPart(keys[:, :, 50:], values[:, :, 50:])]
    visible = drawn(BATCH, 1, 90, seed=4) > 0
    visible[1] = False  # this row sees nothing
    assert mixed.serves(queries, parts)
    for seen in (visible, None):
        expected = mixed_attention(queries, parts, seen, dims**-0.5)
        for threads in (1, 2):
            found = mixed.native_mixed_attention(queries, parts, seen, dims**-0.5, threads)
            torch.testing.assert_close(found.output, expected.output)
            torch.testing.assert_close(found.mass, expected.mass)


def test_what_the_compiled_path_cannot_read_goes_to_torch() -> None:
    keys = drawn(1, KV_HEADS, 9, DIMS, seed=2)
    one, two = drawn(1, HEADS, 1, DIMS, seed=1), drawn(1, HEADS, 2, DIMS, seed=1)
    assert mixed.serves(one, [KvPart(keys, keys)])
    assert not mixed.serves(two, [KvPart(keys, keys)])
    assert not mixed.serves(one.half(), [KvPart(keys.half(), keys.half())])
    assert not mixed.serves(one, [KvPart(keys.mT.contiguous().mT, keys)])


SETTINGS = ConfKVSettings(low=24, high=48, window=8, slack=4, tau=0.05)


@pytest.mark.parametrize("arm", STATIC, ids=lambda arm: arm.name)
def test_a_static_arm_takes_the_room_that_it_was_given(llama: Any, arm: Any) -> None:
    texts = torch.randint(1, 97, (2, 160), generator=torch.Generator().manual_seed(1))
    done = follow(llama, texts, 60, arm.cache(llama.config, SETTINGS, 40))
    assert done.surprise.shape == (2, 100)
    assert done.room.mean() == pytest.approx(40, abs=3)
