"""The bench's own rules: intervals, rivals, what models are taught, and a whole short run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from kvgraph.hooks.confkv.settings import ConfKVSettings
from kvgraph_bench.confkv.confkv import ablate
from kvgraph_bench.confkv.confkv_arms import STATIC, victims
from kvgraph_bench.confkv.followed import follow
from kvgraph_bench.confkv.perplexity import Perplexity
from kvgraph_bench.confkv.resampled import apart
from kvgraph_bench.confkv.small_models import load, random_model, shipped
from kvgraph_bench.teaching.recall_exam import examine

SETTINGS = ConfKVSettings(low=24, high=48, window=8, slack=4, tau=0.05)


@pytest.fixture
def llama() -> Any:
    return random_model("llama")


def test_arms_are_apart_when_nearly_all_pairs_say_so() -> None:
    random = np.random.default_rng(1)
    noise = random.normal(size=40)
    assert apart(noise + 0.1, noise)  # in pairs: the noise is the same
    assert not apart(noise, noise)
    assert not apart(random.normal(size=40) + 0.01, noise)


@pytest.mark.parametrize("arm", STATIC, ids=lambda arm: arm.name)
def test_a_static_arm_takes_the_room_that_it_was_given(llama: Any, arm: Any) -> None:
    texts = torch.randint(1, 97, (2, 160), generator=torch.Generator().manual_seed(1))
    done = follow(llama, texts, 60, arm.cache(llama.config, SETTINGS, 40))
    assert done.surprise.shape == (2, 100)
    assert done.room.mean() == pytest.approx(40, abs=3)


def test_victims_replay_one_schedule_with_the_same_counts(llama: Any) -> None:
    texts = torch.randint(1, 97, (2, 160), generator=torch.Generator().manual_seed(1))
    arms = Perplexity(llama, texts, 60, SETTINGS, lambda said: None)
    arms.run()
    arms.isolate(1)
    rooms = {arms.room[f"victims_{name}"] for name in victims(SETTINGS, 1)}
    assert rooms == {arms.room["ours"]}
    assert arms.surprise["victims_attention"] == pytest.approx(arms.surprise["ours"])
    assert arms.room["ours_int8"] == pytest.approx(arms.room["ours"], rel=0.25)


def test_hiding_what_nobody_reads_changes_nothing(llama: Any) -> None:
    texts = torch.randint(1, 97, (2, 80), generator=torch.Generator().manual_seed(1))
    done = ablate(llama, texts, hidden=0, steps=20, seed=1)
    assert np.abs(done.divergence).max() < 1e-5
    hidden = ablate(llama, texts, hidden=20, steps=20, seed=1)
    assert hidden.divergence.min() > 0
    assert len(hidden.confidence) == 20


def test_the_shipped_model_remembers_and_a_wrong_place_misleads_it() -> None:
    marks = examine(load(shipped("recall")[0]).model, 512, 32, 48)
    assert marks.plain >= 0.95 * marks.n
    assert marks.replaced == marks.repeated
    assert marks.misplaced <= 0.2 * marks.repeated
