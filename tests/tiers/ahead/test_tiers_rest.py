"""Steps that leave the tiers nothing to decide pass them by, and whatever happens ends that."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from kvgraph.hooks.tiers.costs import TransferCosts
from kvgraph.hooks.tiers.jobs import TierAnswer, WorkerStart
from kvgraph.hooks.vllm.tiers.spiller import Rest
from pool_engine import Engine, prompt

pytestmark = pytest.mark.usefixtures("vllm_loaded")
BLOCKS = 129


@pytest.fixture
def resting(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An engine whose pool is full and whose request decodes, and the steps that its tiers
    decided on.
    """
    pytest.importorskip("kvgraph._engine", reason="only the compiled core's steps are passed by")
    engine = Engine(blocks=BLOCKS, warm=2 * BLOCKS)
    for number in range(40):
        engine.serve(prompt(4, number))
    running = engine.ask(prompt(4, 99))
    engine.finish_loading(running)
    order = [key for number in range(5, 40) for key in engine.keys_of(prompt(4, number))]
    engine.advise(order=order, spill_first=order)
    for _ in range(8):
        decode(engine, finishes=True)
    decided: list[int] = []
    spill = engine.bridge.spill

    def noted(ranking: Any, offered: int, step: Any) -> int:
        decided.append(step.evicted)
        return int(spill(ranking, offered, step))

    monkeypatch.setattr(engine.bridge, "spill", noted)
    return engine, decided


def decode(engine: Engine, finishes: bool = False) -> None:
    """A step; with ``finishes``, all copies are made and heard of."""
    if (work := engine.side.step(1)) is not None:
        engine.worker.submit(work)
    if finishes:
        engine.worker.finish_all()
        engine.update()


def test_steps_that_change_nothing_are_not_decided_on(resting: Any) -> None:
    engine, decided = resting
    for _ in range(20):
        decode(engine)
    assert not decided


def test_what_steps_take_is_looked_at_a_few_blocks_at_once(resting: Any) -> None:
    engine, decided = resting
    before = engine.counts.spilled
    taken = 0
    for _ in range(24):
        taken += len(engine.pool.get_new_blocks(1))
        decode(engine, finishes=True)
    assert 0 < len(decided) < taken / 2
    assert engine.counts.spilled > before
    assert engine.counts.spill_lost == 0  # all the same, nothing goes without a copy


def test_what_goes_by_time_alone_is_looked_at_all_the_same(resting: Any) -> None:
    engine, decided = resting
    for _ in range(100):
        decode(engine)
    assert 0 < len(decided) < 10


def test_what_was_brought_back_and_is_not_hit_yet_gives_steps_nothing_to_decide(
    resting: Any,
) -> None:
    engine, decided = resting
    gone = engine.keys_of(prompt(4, 6))
    assert None not in engine.directory.hashes_of(gone)
    engine.want(gone)
    for _ in range(6):
        decode(engine, finishes=True)
    assert engine.counts.prefetched == len(gone)
    decided.clear()
    for _ in range(20):
        decode(engine)
    assert not decided
    while not engine.counts.prefetch_wasted:
        engine.pool.get_new_blocks(1)
        decode(engine)
    assert engine.counts.prefetch_wasted == 1, "noted in the step that took it"


HAPPENS: dict[str, Callable[[Engine], object]] = {
    "orders": lambda engine: engine.want([7]),
    "ranks": lambda engine: engine.advise(order=engine.keys_of(prompt(4, 6))),
    "hears of a worker": lambda engine: engine.hear(TierAnswer(starts=(WorkerStart(8),))),
    "ends a request": lambda engine: engine.end(engine.turns[0]),
    "is asked": lambda engine: engine.ask(prompt(4, 50)),
    "drops copies": lambda engine: engine.drop_copies(),
    "preempts": lambda engine: (
        engine.side.observer.requests_preempted(()) or engine.side.step(1, ["r"])
    ),
    "computes nothing": lambda engine: engine.side.step(0),
    "computes much": lambda engine: engine.side.step(4096),
}


@pytest.mark.parametrize("happens", HAPPENS.values(), ids=HAPPENS)
def test_what_happens_ends_the_rest(resting: Any, happens: Callable[[Engine], object]) -> None:
    engine, decided = resting
    happens(engine)
    decode(engine)
    assert decided


def test_a_rest_ends_when_what_was_looked_at_is_used_up() -> None:
    costs = TransferCosts(lambda: 0.0)
    rest = Rest(16, costs, itertools.count().__next__)
    assert not rest.passes(1, 0)
    rest.begin(2, most=3.0)
    assert rest.passes(2 * 16, 2)
    assert not rest.passes(1, 1)
    assert not rest.passes(3 * 16, 0)
    assert rest.passes(1, 0)
    assert rest.steps == [(3, 2, 0.0), (1, 0, 1.0)]
