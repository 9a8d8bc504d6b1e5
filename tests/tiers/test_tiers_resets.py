"""New weights, and everything at once: nothing wrong is ever matched."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest
from kvgraph.graph.types import Tier
from kvgraph.graph.wire.events import CopiesDropped
from kvgraph.hooks.tiers.jobs import Demote, Load, TierWork
from kvgraph_bench.hotpath import BLOCK_SIZE
from pool_engine import Engine, keys, parked, prompt

pytestmark = pytest.mark.usefixtures("vllm_loaded")


def test_the_workers_are_told_of_a_reset_before_anything_new_reaches_a_disk() -> None:
    engine, told = Engine(warm=8, cold=16), list[TierWork]()
    submit = engine.worker.submit
    engine.worker.submit = lambda work: (told.append(work), submit(work))[1]
    engine.serve(prompt(4, 1))
    assert engine.reset()
    for number in range(8):
        engine.serve(prompt(4, number))
    first_demotion = next(at for at, work in enumerate(told) if any_demotions(work))
    assert [work.disown for work in told].count(True) == 1
    assert next(at for at, work in enumerate(told) if work.disown) <= first_demotion


def any_demotions(work: TierWork) -> bool:
    return any(isinstance(job, Demote) for job in work.jobs)


@pytest.mark.parametrize("warm", [16, 64])
def test_after_a_reset_nothing_old_is_found(warm: int) -> None:
    engine = Engine(warm=warm, cold=32)
    first = parked(engine)
    cold = engine.directory.cold_hashes()
    assert bool(cold) is (warm == 16)
    assert all(h in engine.directory for h in first.request.block_hashes)
    assert engine.reset()
    turn = engine.serve(prompt(4, 1))
    assert turn.computed == 4
    dropped = [e for e in engine.events if isinstance(e, CopiesDropped)]
    assert {e.tier for e in dropped} == {int(Tier.WARM)} | ({int(Tier.COLD)} if cold else set())
    assert not set(cold) & set(engine.worker.disk)
    engine.check_whole()


def test_a_reset_during_a_spill_and_a_demotion_leaves_no_copy() -> None:
    engine = Engine(warm=8, cold=16)
    for number in range(7):
        turn = engine.ask(prompt(4, number))
        engine.finish_loading(turn)
        engine.end(turn)
        engine.step()
    assert engine.worker.open
    assert engine.reset()
    engine.settle()
    assert engine.directory.warm_blocks == engine.directory.cold_blocks == 0
    assert engine.serve(prompt(4, 1)).computed == 4
    assert set(engine.directory.cold_hashes()) == set(engine.worker.disk) == set()
    engine.check_whole()


def test_a_prefetch_under_way_does_not_stop_a_reset() -> None:
    """Stock vLLM resets an idle engine's cache; with a forced reset it even raises if it cannot."""
    engine = Engine()
    first = parked(engine)
    engine.advise(keys(first))
    engine.step()
    assert engine.bridge.promises.lend()
    engine.advise()
    assert engine.reset()
    during = engine.ask(prompt(3, 90))
    engine.step()
    held = {block.block_id for block in engine.bridge.promises.lend()}
    assert not held & {block.block_id for block in during.blocks}, "a worker still writes to them"
    engine.end(during)
    engine.settle()
    assert engine.counts.prefetched == 0
    assert engine.serve(prompt(4, 1)).computed == 4
    engine.check_whole()


@pytest.mark.parametrize("cold", [0, 12])
def test_random_traffic_matches_nothing_wrong_and_leaves_the_pool_whole(cold: int) -> None:
    """Turns, aborts, preemptions, failures, resets, advice and late answers, in any order."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")  # noqa: T201 - shown when the test fails
    rng = random.Random(seed)
    engine = Engine(blocks=24, warm=12, cold=cold)
    costs, totals = engine.bridge.ledger.costs, Counter[str]()
    costs.worth_loading = lambda *_: rng.random() < 0.9
    seen: list[int] = []
    actions: list[tuple[float, Callable[[], None]]] = [
        (0.50, lambda: _arrive(rng, engine, seen)),
        (0.75, lambda: _leave(rng, engine)),
        (0.80, lambda: _advise(rng, engine, seen)),
        (0.82, lambda: totals.update(resets=_reset(rng, engine))),
        (1.00, lambda: None),
    ]

    def all_happened() -> bool:
        return min(engine.counts.loaded, engine.counts.prefetched, totals["resets"]) > 0

    steps = 0
    while steps < 1500 or not all_happened():
        steps += 1
        assert steps < 30_000, "nothing is loaded, prefetched or reset any more"
        roll = rng.random()
        next(act for bound, act in actions if roll < bound)()
        engine.step()
        for job in [job for job in engine.worker.open if rng.random() < 0.5]:
            wrong = [at for at in range(len(job.copies)) if rng.random() < 0.03]
            engine.worker.finish(job, wrong)
        if rng.random() < 0.5:  # heard before the next step is scheduled, or only after it
            engine.update()
    for turn in list(engine.turns):
        engine.end(turn)
    engine.advise()
    engine.worker.finish_all()
    engine.settle()
    engine.check_whole()
    assert bool(engine.counts.demoted) is bool(cold)


def _arrive(rng: random.Random, engine: Engine, seen: list[int]) -> None:
    if len(engine.turns) < 5:
        parts = [rng.randrange(3) for _ in range(rng.randrange(1, 8))]
        tokens = [part for part in parts for _ in range(BLOCK_SIZE)] + [9] * rng.randrange(2)
        seen += keys(engine.ask(tokens))
        del seen[:-200]


def _leave(rng: random.Random, engine: Engine) -> None:
    if engine.turns:
        turn = rng.choice(engine.turns)
        if turn.state == "running" and rng.random() < 0.1:
            engine.preempt(turn)
        elif turn.state == "running" or (turn.state != "over" and rng.random() < 0.2):
            engine.end(turn)


def _reset(rng: random.Random, engine: Engine) -> bool:
    for turn in [turn for turn in engine.turns if turn.state != "over"]:
        engine.end(turn)
    if rng.random() < 0.5:
        engine.worker.finish_all(Load)
        engine.step()
    return engine.reset()


def _advise(rng: random.Random, engine: Engine, seen: list[int]) -> None:
    def some() -> list[int]:
        return rng.sample(seen, rng.randrange(len(seen) + 1))

    engine.advise(some()[:30], order=some(), spill_first=some() + some(), demote_first=some())
