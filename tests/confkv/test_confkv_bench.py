"""The bench's own rules: intervals, rivals, what models are taught, and a whole short run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kvgraph
import numpy as np
import pytest
import torch
from kvgraph.bench.confkv import small_models
from kvgraph.bench.confkv.ablation import ablate
from kvgraph.bench.confkv.confkv_arms import STATIC, coarse, victims
from kvgraph.bench.confkv.confkv_texts import haystacks, told_codes
from kvgraph.bench.confkv.followed import Followed, follow, read_at_once
from kvgraph.bench.confkv.perplexity import Perplexity
from kvgraph.bench.confkv.resampled import apart, falls_over_bins, gap_closed, pearson
from kvgraph.bench.confkv.rivals import HeavyHitters, Random
from kvgraph.bench.confkv.small_models import load, random_model, shipped
from kvgraph.bench.confkv.sweeps import mistakes, points
from kvgraph.bench.confkv.tasks.pages import STEPS, walk
from kvgraph.bench.errors import BenchError
from kvgraph.bench.teaching.corpus import learn_tokenizer
from kvgraph.bench.teaching.lessons import IGNORED, RecallLessons, copying, needle
from kvgraph.bench.teaching.pupils import PUPILS, make_model
from kvgraph.bench.teaching.recall_exam import examine
from kvgraph.bench.teaching.recall_language import ASK, FACT, FACT_TOKENS, make_quiz
from kvgraph.bench.teaching.teach import teach
from kvgraph.hooks.confkv.settings import ConfKVSettings
from kvgraph.hooks.confkv.stores import Cells

SETTINGS = ConfKVSettings(low=24, high=48, window=8, slack=4, tau=0.05)


@pytest.fixture
def llama() -> Any:
    return random_model("llama")


def test_the_gap_closed_is_a_share_of_the_way() -> None:
    full, window = np.full(9, 2.0), np.full(9, 3.0)
    assert gap_closed(window, window, full) == pytest.approx(0.0)
    assert gap_closed(window, full, full) == pytest.approx(1.0)
    assert gap_closed(window, full + 0.25, full) == pytest.approx(0.75)
    assert np.isnan(gap_closed(full, full, full)).all()


def test_arms_are_apart_when_nearly_all_pairs_say_so() -> None:
    random = np.random.default_rng(1)
    noise = random.normal(size=40)
    assert apart(noise + 0.1, noise)  # in pairs: the noise is the same
    assert not apart(noise, noise)
    assert not apart(random.normal(size=40) + 0.01, noise)


def test_correlation_and_bins() -> None:
    x = np.linspace(0, 1, 500)
    r, chance = pearson(x, -x + np.random.default_rng(1).normal(size=500) * 0.3)
    assert r < -0.5
    assert chance < 1e-6
    assert falls_over_bins(x, -x)
    assert not falls_over_bins(x, x)


@pytest.mark.parametrize("arm", STATIC, ids=lambda arm: arm.name)
def test_a_static_arm_takes_the_room_that_it_was_given(llama: Any, arm: Any) -> None:
    texts = torch.randint(1, 97, (2, 160), generator=torch.Generator().manual_seed(1))
    done = follow(llama, texts, 60, arm.cache(llama.config, SETTINGS, 40))
    assert done.surprise.shape == (2, 100)
    assert done.room.mean() == pytest.approx(40, abs=3)


def test_nothing_forgotten_is_read_at_once(llama: Any) -> None:
    texts = torch.randint(1, 97, (2, 60), generator=torch.Generator().manual_seed(1))
    cache = kvgraph.ConfKVCache(llama.config)
    done = follow(llama, texts, 20, cache)
    nats, right = read_at_once(llama, texts, 20)
    np.testing.assert_allclose(done.surprise, nats, atol=1e-5)
    assert (done.right == right).mean() > 0.98
    assert done.confidence.shape == done.surprise.shape


def test_heavy_hitters_are_summed_over_every_query_of_the_prompt(llama: Any) -> None:
    prompt = torch.arange(1, 31)[None]
    cache = kvgraph.ConfKVCache(llama.config, ranker=HeavyHitters())
    with torch.no_grad():
        llama(prompt, past_key_values=cache)
    memory = cache.layers[0].table.memory
    assert memory.sum().item() == pytest.approx(30.0, rel=1e-4)
    assert memory[0, 0] > memory[0, -1]


def test_victims_replay_one_schedule_with_the_same_counts(llama: Any) -> None:
    texts = torch.randint(1, 97, (2, 160), generator=torch.Generator().manual_seed(1))
    arms = Perplexity(llama, texts, 60, SETTINGS, lambda said: None)
    arms.run()
    arms.isolate(1)
    rooms = {arms.room[f"victims_{name}"] for name in victims(SETTINGS, 1)}
    assert rooms == {arms.room["ours"]}
    assert arms.surprise["victims_attention"] == pytest.approx(arms.surprise["ours"])
    assert arms.room["ours_int8"] == pytest.approx(arms.room["ours"], rel=0.25)


def test_random_victims_are_the_same_each_time() -> None:
    memory, position = torch.zeros(1, 9), torch.arange(9)[None]
    one, same, other = (Random(seed).scores(memory, position, position > 0) for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_hiding_what_nobody_reads_changes_nothing(llama: Any) -> None:
    texts = torch.randint(1, 97, (2, 80), generator=torch.Generator().manual_seed(1))
    done = ablate(llama, texts, hidden=0, steps=20, seed=1)
    assert np.abs(done.divergence).max() < 1e-5
    hidden = ablate(llama, texts, hidden=20, steps=20, seed=1)
    assert hidden.divergence.min() > 0
    assert len(hidden.confidence) == 20


class Numbered:
    """A learned tokenizer as transformers' own answer."""

    def __init__(self) -> None:
        random = np.random.default_rng(1)
        self._learned = learn_tokenizer([needle(random) for _ in range(300)])

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": self._learned.encode(text).ids}


def test_codes_stand_at_the_same_places_of_a_batch() -> None:
    tokenizer, texts = Numbered(), torch.zeros((3, 100), dtype=torch.int64)
    codes = told_codes(tokenizer, 3, seed=1)
    asked, answer = haystacks(tokenizer, texts, depth=0.5, seed=1)
    told, questions = codes.told.shape[1], codes.question.shape[1]
    at = int(0.5 * (100 - told))
    assert torch.equal(asked[:, at : at + told], codes.told)
    assert torch.equal(asked[:, -answer:], codes.answer)
    assert torch.equal(asked[:, -answer - questions : -answer], codes.question)
    assert asked.shape[1] == 100 + told + questions + answer


def test_agents_take_all_their_steps_and_are_asked_in_one_of_four(llama: Any) -> None:
    tokenizer = Numbered()
    pages = told_codes(tokenizer, 2 * STEPS, seed=1)
    pages = type(pages)(*(part % 96 + 1 for part in pages))  # the model has so many tokens
    done = walk(llama, pages, kvgraph.ConfKVCache(llama.config), lambda cache: cache.bytes())
    assert done.right.shape == (2, STEPS // 4, pages.answer.shape[1] - 1)
    assert done.tokens > STEPS * pages.told.shape[1]
    assert done.peak > 0


def test_a_point_of_the_sweep_differs_in_one_setting() -> None:
    it = ConfKVSettings(low=64, high=256, window=32, slack=8)
    for settings in points(it).values():
        changed = [n for n in it.__slots__ if getattr(settings, n) != getattr(it, n)]
        assert len(changed) <= 1


def test_a_confident_mistake_is_judged_by_what_follows_it() -> None:
    sure = np.array([[0.9, 0.1, 0.1, 0.1]])
    right = np.array([[False, False, True, True]])
    done = Followed(np.array([[9.0, 2.0, 2.0, 2.0]]), right, sure, np.zeros(4), 0)
    share, behind = mistakes(done, np.ones((1, 4)))
    assert share == pytest.approx(0.25)
    assert behind == pytest.approx(1.0)  # its own surprise does not count


def test_four_bits_have_fifteen_steps() -> None:
    values = torch.randn(1, 2, 50, 8, generator=torch.Generator().manual_seed(1))
    with coarse():
        cells = Cells(values, 50)
        cells.append(values, 0)
    assert cells.cells.abs().max() == 7
    assert (cells.cells * cells.scale[:, :, None] - values).abs().max() < 0.6 * cells.scale.max()


def test_a_quiz_asks_for_what_was_told_last() -> None:
    quiz = make_quiz(20, 200, 12, 4, np.random.default_rng(1))
    for row in range(20):
        ids = quiz.ids[row]
        for number in range(4):
            question = ids[200 - (4 - number) * FACT_TOKENS :][:FACT_TOKENS]
            told = [
                (at, ids[at : at + FACT_TOKENS])
                for at in np.flatnonzero(ids[: 200 - 4 * FACT_TOKENS] == FACT)
                if ids[at + 1] == question[1]
            ]
            assert question[0] == ASK
            assert told[-1][0] == quiz.told_at[row, number]
            assert len(told) == quiz.tellings[row, number]
            assert (told[-1][1][2:] == question[2:]).all()
    assert quiz.tellings.max() > 1
    assert quiz.answered.sum(1).tolist() == [12] * 20


def test_copying_is_judged_from_the_second_time_on() -> None:
    batch = copying(np.random.default_rng(1), 50)
    period = int((batch.targets[0] == IGNORED).sum()) + 1
    assert (batch.targets[:, period - 1] == batch.ids[:, 0]).all()


def test_quizzes_grow_as_they_are_passed() -> None:
    lessons, random = RecallLessons(), np.random.default_rng(1)
    short, batch = lessons.batch(201, random), lessons.batch(202, random)
    assert batch.kind == short.kind == "recall"
    assert short.ids.shape[1] < batch.ids.shape[1] == 63
    for _ in range(60):
        lessons.heard(short, 1.0)
    assert lessons.state["length"] == 64
    for _ in range(60):
        lessons.heard(batch, 1.0)
    assert lessons.state["length"] > 64
    assert lessons.batch(0, random).kind == "copying"


def test_a_model_is_taught_kept_and_taken_up_again(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    try:
        teach("recall", tmp_path, None, None, 3, lambda said: None)
        folder = teach("recall", tmp_path, None, None, 4, lambda said: None)
    finally:
        torch.set_num_threads(threads)
    assert torch.load(tmp_path / "recall.state", weights_only=False)["step"] == 4
    loaded = load(folder)
    assert loaded.tokenizer("t1 t20 t90")["input_ids"] == [1, 20, 90]
    assert loaded.model.dtype == torch.float32


def test_turning_a_block_there_and_back_is_turning_nothing() -> None:
    torch.manual_seed(1)
    marks = examine(make_model(PUPILS["recall"]).eval(), 128, 9, 16)
    assert marks.n == 16
    assert 0 < marks.n_repeated < 16
    assert marks.replaced == marks.repeated


def test_the_shipped_model_remembers_and_a_wrong_place_misleads_it() -> None:
    marks = examine(load(shipped("recall")[0]).model, 512, 32, 48)
    assert marks.plain >= 0.95 * marks.n
    assert marks.replaced == marks.repeated
    assert marks.misplaced <= 0.2 * marks.repeated


def test_a_gguf_file_needs_packages_that_the_error_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BenchError, match=r"no model at .*small\.gguf"):
        load(tmp_path / "small.gguf")
    (tmp_path / "small.gguf").touch()
    monkeypatch.setattr(small_models, "find_spec", lambda name: None)
    with pytest.raises(BenchError, match="pip install gguf accelerate"):
        load(tmp_path / "small.gguf")
