"""Copies come back for the request that needs them."""

from __future__ import annotations

from typing import Any

import pytest
from kvgraph_bench.hotpath import BLOCK_SIZE
from pool_engine import BLOCK_BYTES, Engine, keys, parked, prompt

pytestmark = pytest.mark.usefixtures("vllm_loaded")


def test_the_last_token_is_always_computed() -> None:
    engine = Engine()
    parked(engine)
    exactly = engine.serve(prompt(4, 1, extra=0))
    assert exactly.loaded == 3


def test_a_second_request_waits_for_the_first_ones_load() -> None:
    engine = Engine(blocks=33)
    parked(engine)
    one, two = engine.ask(prompt(4, 1)), engine.ask([*prompt(4, 1), 7])
    engine.step()
    assert (one.state, two.state) == ("loading", "waiting")
    engine.step()
    assert two.state == "waiting"
    engine.worker.finish_all()
    engine.step()
    engine.step()
    assert (one.state, two.state) == ("running", "running")
    assert (one.loaded, two.loaded, two.hits) == (4, 0, 4)
    engine.end(one)
    engine.end(two)
    engine.settle()
    engine.check_whole()


def test_a_failed_load_is_computed_from_its_first_gap() -> None:
    engine = Engine()
    parked(engine)
    turn = engine.ask(prompt(4, 1))
    engine.step()
    (load,) = engine.worker.open
    engine.worker.finish(load, failed=[2])
    engine.finish_loading(turn)
    assert (turn.loaded, turn.computed) == (2, 2)
    assert engine.counts.load_failed == 1
    assert turn.request.block_hashes[2] not in engine.directory, "it would fail again"
    engine.end(turn)
    engine.settle()
    engine.check_whole()


def test_a_request_aborted_while_it_loads_gives_its_blocks_back() -> None:
    engine = Engine()
    parked(engine)
    turn = engine.ask(prompt(4, 1))
    engine.step()
    engine.end(turn)
    engine.step()
    held = [block for block in turn.blocks if block.ref_cnt]
    assert len(held) == 4, "a worker still writes to them"
    engine.worker.finish_all()
    engine.settle()
    again = engine.serve(prompt(4, 1))
    assert again.loaded == 4
    engine.check_whole()


def test_a_preempted_request_is_loaded_again() -> None:
    engine = Engine(blocks=10)
    turn = engine.ask(prompt(4, 1))
    engine.step()
    engine.preempt(turn)
    turn.state = "behind"
    engine.settle()
    other = engine.serve(prompt(8, 2))
    assert other.computed == 8
    turn.state = "waiting"
    engine.finish_loading(turn)
    assert turn.computed == 0
    engine.end(turn)
    engine.settle()
    engine.check_whole()


def test_what_is_slower_than_computing_is_declined_once() -> None:
    engine = Engine()
    parked(engine)
    asked: list[Any] = []
    engine.bridge.ledger.costs.worth_loading = lambda *sizes: bool(asked.append(sizes))
    blocker = engine.ask(prompt(13, 2))
    engine.step()
    turn = engine.ask(prompt(4, 1))
    for _ in range(5):
        engine.step()
        assert turn.state == "waiting", "there are no blocks for it yet"
    assert asked == [(4 * BLOCK_SIZE, 4 * BLOCK_BYTES, 0, 0)]
    engine.end(blocker)
    engine.finish_loading(turn)
    assert turn.computed == 4
    assert engine.counts.recomputed == 4


def test_whom_a_prefetch_keeps_waiting_for_too_long_computes() -> None:
    """A disk may hang: a request that could compute must not wait for what nobody hears of."""
    engine = Engine(blocks=33)
    first = parked(engine)
    engine.advise(keys(first))
    engine.step()
    assert engine.bridge.promises.lend()
    engine.advise()
    now = engine.bridge.ledger.clock()
    turn = engine.ask(prompt(4, 1))
    engine.step()
    assert turn.state == "waiting"
    engine.bridge.ledger.clock = lambda: now + 2.0
    engine.step()
    assert turn.state == "running"
    assert turn.computed == 4
    engine.end(turn)
    engine.settle()
    engine.check_whole()


def test_others_wait_longer_for_a_load_that_usually_takes_longer() -> None:
    engine = Engine(blocks=33)
    ledger = engine.bridge.ledger
    parked(engine)
    ledger.costs.load_bytes_per_s = BLOCK_BYTES  # a block a second
    one, two = engine.ask(prompt(4, 1)), engine.ask([*prompt(4, 1), 7])
    now = ledger.clock()
    ledger.clock = lambda: now
    engine.step()
    ledger.clock = lambda: now + 8.5
    engine.step()
    assert (one.state, two.state) == ("loading", "waiting")
    ledger.clock = lambda: now + 9.5
    engine.step()
    assert two.state == "running"
