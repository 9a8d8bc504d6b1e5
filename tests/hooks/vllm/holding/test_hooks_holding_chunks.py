"""What steps are believed to cost, and to whom a limit of prompts belongs."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hall import Clock, Hall, shape
from kvgraph.hooks.vllm.holding.chunks import PromptChunks
from kvgraph_bench.paper.paper_engine import Shape
from paper import fail, text


def scheduler_of(most: int, **fields: Any) -> Any:
    """What ``PromptChunks`` reads of a scheduler; one request runs for ever, and has its blocks."""
    config = SimpleNamespace(enable_chunked_prefill=True, long_prefill_token_threshold=0)
    pool = SimpleNamespace(get_num_free_blocks=lambda: 0)
    request = SimpleNamespace(is_finished=lambda: False, num_tokens=9, num_computed_tokens=9)
    return SimpleNamespace(
        scheduler_config=config, max_num_scheduled_tokens=most, max_num_encoder_input_tokens=0,
        need_mamba_block_aligned_split=False, running=[request], block_size=16,
        kv_cache_manager=SimpleNamespace(block_pool=pool), **fields,
    )  # fmt: skip


def limits(
    most: int,
    took: Callable[[int, bool], float],
    asked: Callable[[], list[int]],
    decodes: int,
    steps: int = 1500,
) -> list[int]:
    """The limit after each step of a crowd, by prompts ``asked`` and how long steps ``took``."""
    scheduler, now, waiting = scheduler_of(most), 0.0, list[int]()
    chunks, found = PromptChunks(scheduler, 0), list[int]()
    for _ in range(steps):
        waiting += asked()
        limit, tokens = scheduler.scheduler_config.long_prefill_token_threshold or most, decodes
        for at, prompt in enumerate(waiting):
            part = min(limit, most - tokens, prompt)
            waiting[at] -= part
            tokens += part
        waiting = [each for each in waiting if each]
        chunks.step(tokens, now, crowded=True)
        found.append(scheduler.scheduler_config.long_prefill_token_threshold)
        now += took(tokens, tokens > decodes)
    return found


def agents(rng: random.Random) -> list[int]:
    """Turns often, and long prompts at times."""
    turn = [rng.randint(50, 1500)] if rng.random() < 0.2 else []
    return [*turn, rng.randint(4000, 60_000)] if rng.random() < 0.02 else turn


@pytest.mark.parametrize("prompts", ["none", "agents", "turns", "long"])
@pytest.mark.parametrize("graphs_s", [0.0, 0.02], ids=["", "slower without graphs"])
def test_an_engine_as_fast_as_a_gpu_is_hardly_ever_limited(prompts: str, graphs_s: float) -> None:
    """Steps vary by 30 %, the first ones compile, and some take two seconds for no reason."""
    rng = random.Random(7)
    asked: dict[str, Callable[[], list[int]]] = {
        "none": list,
        "agents": lambda: agents(rng),
        "turns": lambda: [rng.randint(300, 1500)] if rng.random() < 0.3 else [],
        "long": lambda: [30_000] if rng.random() < 0.5 else [],
    }
    left = [2.0, 2.0, 2.0]

    def took(tokens: int, has_prompt: bool) -> float:
        if rng.random() < 0.003:
            return 2.0
        fixed = 0.015 + graphs_s * has_prompt + (left.pop() if left else 0.0)
        return (fixed + 20e-6 * tokens) * rng.uniform(0.7, 1.3)

    found = limits(8192, took, asked[prompts], 64 + rng.randint(0, 3))
    assert sum(map(bool, found)) <= 0.02 * len(found)


def test_steps_that_only_decode_say_nothing_of_prompts() -> None:
    rng = random.Random(8)
    found = limits(8192, lambda n, _: 0.016 * rng.uniform(0.7, 1.3), list, 64, steps=400)
    assert not any(found)


def test_where_every_fourth_step_hangs_prompts_cost_what_the_others_take() -> None:
    steps = iter(range(1000))

    def took(tokens: int, _: bool) -> float:
        return 2.0 if next(steps) % 4 == 3 else 0.015 + 20e-6 * tokens

    found = limits(8192, took, lambda: [8000], 64, steps=400)
    assert not any(found)


def test_where_steps_last_whatever_they_compute_no_prompt_stays_limited() -> None:
    """A model whose decode steps take nearly as long as its whole ones, so that none is short."""
    found = limits(192, lambda n, _: max(n / 140, 1.28), lambda: [400], 20, steps=200)
    assert not any(found[8:])


@pytest.mark.parametrize("waiting", [1, 3])
@pytest.mark.parametrize("pauses", [0.0, 0.5], ids=["all long", "some only decode"])
def test_a_slow_engine_stays_limited_while_prompts_follow_one_another(
    waiting: int, pauses: float
) -> None:
    rng, first = random.Random(9), [[30_000] * waiting]

    def asked() -> list[int]:
        return first.pop() if first else [300] * (rng.random() >= pauses)

    def took(tokens: int, _: bool) -> float:
        return (0.05 + 0.001 * tokens) * rng.uniform(0.9, 1.1)

    found = limits(2048, took, asked, 16, steps=100)
    # Where several prompts fill each step, what a step takes in any case is told from afar.
    most = 160 if waiting == 1 and pauses else 512
    assert all(128 <= each <= most for each in found[4:])


@pytest.mark.parametrize(
    ("fields", "least"),
    [
        ({}, 8),
        ({"num_spec_tokens": 4}, 8),
        ({"num_spec_tokens": 8}, 9),
        ({"num_prefill_lookahead": 12}, 12),
    ],
)
def test_a_limit_leaves_what_vllm_may_not_cut(fields: dict[str, int], least: int) -> None:
    scheduler = scheduler_of(128, **fields)
    chunks = PromptChunks(scheduler, 0)
    for number in range(8):
        chunks.step(128, number * 8.0, crowded=True)
    assert scheduler.scheduler_config.long_prefill_token_threshold == least


@pytest.mark.usefixtures("vllm_loaded")
def test_drafts_are_not_cut(paper: Callable[..., Any]) -> None:
    """vLLM fills the drafts of a new request up, and fails if the limit then cuts them."""
    engine = paper(Shape(blocks=97, warm=None, drafts=8), clock=Clock())
    engine.ask(text(4, 1), 300)
    engine.step()
    chunks = PromptChunks(engine.scheduler, 0)
    for number in range(4):
        chunks.step(128, number * 8.0, crowded=True)
    assert engine.scheduler.scheduler_config.long_prefill_token_threshold == 9
    for _ in range(8):
        again = engine.ask(text(4, 1), 12).request_id  # all but its last token is in the cache
        for _ in range(3):
            engine.step()
    engine.settle()
    assert len(engine.outputs[again]) == 12


@pytest.mark.usefixtures("vllm_loaded")
def test_prompts_that_do_not_fit_side_by_side_follow_one_another(paper: Callable[..., Any]) -> None:
    """Else each takes blocks that another needs, and is preempted."""
    engine = paper(Shape(blocks=97, warm=None), clock=Clock())
    chunks, now = PromptChunks(engine.scheduler, 0), 0.0
    config = engine.scheduler.scheduler_config
    asked = [engine.ask(text(20, seed), 8) for seed in range(12)]
    limits = set()
    while not all(each.is_finished() for each in asked):
        engine.step()
        chunks.step(128, now := now + 8.0, crowded=True)
        limits.add(config.long_prefill_token_threshold)
    assert sum(each.num_preemptions for each in asked) == 0
    assert limits == {0, 8}


def test_what_another_sets_meanwhile_is_neither_changed_nor_taken_back() -> None:
    scheduler = scheduler_of(128)
    chunks = PromptChunks(scheduler, 0)
    for number in range(4):
        chunks.step(128, number * 8.0, crowded=True)
    assert scheduler.scheduler_config.long_prefill_token_threshold
    scheduler.scheduler_config.long_prefill_token_threshold = 77
    chunks.step(128, 40.0, crowded=True)
    chunks.rest()
    assert scheduler.scheduler_config.long_prefill_token_threshold == 77


@pytest.mark.usefixtures("vllm_loaded")
def test_a_limit_that_cannot_be_taken_back_holds_nobody(paper: Callable[..., Any]) -> None:
    hall = Hall(paper(shape(), clock=Clock()))
    hall.shut()
    held = hall.ask(2, 1)
    assert hall.held == [held]
    hall.holding._chunks.rest = fail
    hall.engine.connector.detach(0.0)
    hall.engine.settle()
    assert len(hall.engine.outputs[held]) == 1
