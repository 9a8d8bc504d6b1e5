"""A forced reset succeeds wherever stock vLLM's does, and nothing old is read after it."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
from kvgraph.hooks.tiers.jobs import Load
from kvgraph.hooks.vllm.tiers.weights import follow_worker_calls
from kvgraph_bench.paper.paper_engine import PaperEngine, Shape
from paper import begin_load, fail, park, settle_whole, text

PARKED = text(6, 1)


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def loading(request: pytest.FixtureRequest, paper: Any) -> tuple[Any, Any]:
    """An engine with tiers, and a request for four tokens that waits for a load."""
    engine = paper(Shape(asynchronous=request.param))
    park(engine, PARKED)
    return engine, begin_load(engine, PARKED, output=4)


@pytest.mark.parametrize("connector", [False, True])
def test_while_a_request_waits_for_a_load(loading: tuple[Any, Any], connector: bool) -> None:
    engine, request = loading
    assert engine.reset(reset_running_requests=True, reset_connector=connector)
    settle_whole(engine, (request, 4))  # the load ends, and what it brought is of old weights


def test_after_a_load_that_nobody_scheduled_yet(loading: tuple[Any, Any]) -> None:
    """As in ``pause(mode="keep")``: the request holds its blocks, and vLLM has heard of the end."""
    engine, request = loading
    pause(engine)
    for _ in range(6):
        engine.step()
        engine.finish_copies()
    assert request.request_id in engine.scheduler.finished_recving_kv_req_ids
    assert engine.reset(reset_running_requests=True, reset_connector=True)
    pause(engine, over=True)
    settle_whole(engine, (request, 4))


@pytest.mark.parametrize("warm", [None, 64])
def test_with_a_step_in_flight(paper: Any, warm: int | None) -> None:
    engine = paper(Shape(asynchronous=True, warm=warm))
    requests = [engine.ask(text(3, seed), output=9) for seed in range(3)]
    for _ in range(4):
        engine.step()
    assert engine.batches
    assert engine.reset(reset_running_requests=True)
    settle_whole(engine, *((each, 9) for each in requests))


def test_a_reset_that_stock_refuses_is_refused(paper: Any) -> None:
    engine = paper(Shape())
    park(engine, PARKED)
    begin_load(engine, PARKED)
    engine.ask(text(2, 5), output=50)
    engine.step()
    assert engine.scheduler.running
    assert not engine.reset()
    settle_whole(engine)


def test_an_aborted_load_does_not_stop_a_reset(loading: tuple[Any, Any]) -> None:
    engine, request = loading
    engine.abort(request)
    assert engine.reset()
    settle_whole(engine)
    assert len(engine.serve(PARKED, 3)) == 3


def test_a_load_that_fails_after_a_reset_touches_nobody_else(loading: tuple[Any, Any]) -> None:
    engine, request = loading
    assert engine.reset(reset_running_requests=True)
    others = [engine.ask(text(3, seed), output=20) for seed in range(40, 43)]
    engine.step()
    for worker in engine.workers:
        worker.failing = lambda job: range(len(job.copies)) if isinstance(job, Load) else ()
    settle_whole(engine, (request, 4), *((each, 20) for each in others))


@pytest.mark.parametrize("broken", ["step", "_looked_up", "_catch_up"])
def test_a_side_that_failed_does_not_stop_a_reset(
    loading: tuple[Any, Any], broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, request = loading
    monkeypatch.setattr(engine.side, broken, fail)
    engine.rewire()
    engine.ask(text(2, 5))
    for _ in range(4):
        engine.step()
    assert engine.side is None
    assert engine.reset(reset_running_requests=True)
    settle_whole(engine, (request, 4))
    again = engine.ask(text(2, 6), output=30)
    for _ in range(4):
        engine.step()
    assert engine.reset(reset_running_requests=True), "long after"
    engine.settle()
    assert len(engine.outputs[again.request_id]) == 30


def pause(engine: PaperEngine, over: bool = False) -> None:
    from vllm.v1.core.sched.interface import PauseState

    state = PauseState.UNPAUSED if over else PauseState.PAUSED_ALL
    engine.scheduler.set_pause_state(state)


def test_a_void_load_whose_answer_cannot_be_taken_is_computed_all_the_same(
    loading: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, request = loading
    assert engine.reset(reset_running_requests=True)
    bridge, computed = engine.side.bridge, []
    take, compute = bridge.ledger.book.answer_all, bridge.promises._compute

    def fail_after_it(done: Any) -> None:
        take(done)
        fail()

    monkeypatch.setattr(bridge.ledger.book, "answer_all", fail_after_it)
    monkeypatch.setattr(
        bridge.promises, "_compute", lambda each: (computed.append(each), compute(each))
    )
    engine.finish_copies()
    for _ in range(3):
        engine.step()
    monkeypatch.undo()
    engine.settle()
    assert computed == [request]
    assert len(engine.outputs[request.request_id]) == 4


# Weights that others may have now ---------------------------------------------------------------


def disowned(engine: Any) -> list[bool]:
    """Of each order that the workers get from now on: whether it disowns disk and store."""
    told: list[bool] = []
    for worker in engine.workers:
        submit = worker.submit

        def noted(work: Any, *rest: Any, submit: Any = submit) -> None:
            told.append(work.disown)
            submit(work, *rest)

        worker.submit = noted
    return told


def is_copied(engine: Any) -> bool:
    hashes = engine.make("probe", PARKED, 1).block_hashes
    return any(each in engine.side.bridge.ledger.directory for each in hashes)


def test_a_reset_that_is_refused_leaves_nothing_to_other_engines(paper: Any) -> None:
    """A trainer that pushed weights resets, and goes on whatever the answer is."""
    engine = paper(Shape(cold=64))
    park(engine, PARKED)
    engine.ask(text(2, 5), output=50)
    engine.step()
    told = disowned(engine)
    assert not engine.reset()
    assert not is_copied(engine)
    engine.settle()
    assert told[0]
    assert engine.is_whole()


@pytest.mark.parametrize(
    ("method", "kept"),
    [
        ("reload_weights", False),
        ("load_my_weights", False),  # of a trainer's worker extension
        (print, False),  # ``LLM.apply_model``
        ("compute_weight_checksums", True),
    ],
)
@pytest.mark.parametrize("fails", [False, True])
def test_what_workers_are_told_from_outside_may_be_new_weights(
    paper: Any, method: Any, kept: bool, fails: bool
) -> None:
    from vllm.v1.engine.core import EngineCore

    engine = paper(Shape(cold=64))
    park(engine, PARKED)
    called, told = list[Any](), disowned(engine)

    def collective_rpc(*args: Any) -> list[Any]:
        called.append(args[0])
        if fails:
            raise RuntimeError("a worker failed")
        return []

    core: Any = SimpleNamespace(
        scheduler=engine.scheduler, model_executor=SimpleNamespace(collective_rpc=collective_rpc)
    )
    follow_worker_calls()
    with pytest.raises(RuntimeError) if fails else contextlib.nullcontext():
        assert EngineCore.collective_rpc(core, method) == []
    assert called == [method]
    assert is_copied(engine) is kept
    engine.serve(text(2, 77))
    assert any(told) is not kept
    assert engine.side is not None


def test_a_version_that_a_trainer_gives_weights_says_that_they_are_new(paper: Any) -> None:
    """It may have brought them without a call of vLLM's, as by a thread of its own worker's."""
    from vllm.v1.engine.core import EngineCore

    engine = paper(Shape(cold=64))
    park(engine, PARKED)
    told, core = disowned(engine), SimpleNamespace(scheduler=engine.scheduler)
    follow_worker_calls()
    EngineCore.set_weight_version(core, "step-7")
    assert core._weight_version == "step-7"
    assert not is_copied(engine)
    engine.serve(text(2, 77))
    assert any(told)
    assert engine.side is not None


def test_calls_of_workers_before_there_is_a_connector_are_vllms_own() -> None:
    from vllm.v1.engine.core import EngineCore

    core: Any = SimpleNamespace(
        model_executor=SimpleNamespace(collective_rpc=lambda method, *_: [method])
    )
    follow_worker_calls()
    assert EngineCore.collective_rpc(core, "measure") == ["measure"]
