"""New sessions wait for room, on vLLM's own schedulers: who, how long, and in which order."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hall import BLOCK_SIZE, Clock, Hall, by_priority, shape, tokens_of
from kvgraph.graph.types import as_keys
from kvgraph.graph.wire.advice import HOLD_MAX_S, EvictionRanking
from kvgraph.graph.wire.events import HOLD_ENDS, RequestHeld
from kvgraph.hooks.keys import key_of
from kvgraph.hooks.settings import (
    ADMISSION_VARIABLE,
    HOLD_MAX_VARIABLE,
    EngineSettings,
    engine_settings,
)
from kvgraph.hooks.vllm.holding.queue import HoldingQueue
from kvgraph.hooks.vllm.patches import bind_scheduler, follow_schedulers
from kvgraph_bench.closed.closed_paper import waits
from kvgraph_bench.paper.paper_engine import PaperEngine
from kvgraph_bench.paper.paper_model import Batch
from paper import fail, park, text

pytestmark = pytest.mark.usefixtures("vllm_loaded")
NewHall = Callable[..., Hall]
longer = range(5 * BLOCK_SIZE)  # what a session's next turn adds


@pytest.fixture(autouse=True)
def two_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOLD_MAX_VARIABLE, "120")


@pytest.fixture
def new_hall(paper: Callable[..., Any]) -> NewHall:
    """Makes one of an engine of a shape; ``keeps_up``: it has met no queue yet."""

    def make(keeps_up: bool = False, **fields: Any) -> Hall:
        return Hall(paper(shape(**fields), clock=Clock()), keeps_up=keeps_up)

    return make


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def hall(request: pytest.FixtureRequest, new_hall: NewHall) -> Hall:
    return new_hall(asynchronous=request.param)


def test_an_engine_that_keeps_up_holds_nobody(new_hall: NewHall) -> None:
    hall = new_hall(keeps_up=True)
    hall.say(0)
    for number in range(40):
        hall.ask(6, 50 + number)
        assert hall.held == []
        hall.step(20, room=0)


def test_a_burst_that_makes_a_queue_is_held(new_hall: NewHall) -> None:
    hall = new_hall(keeps_up=True)
    hall.say(0)
    hall.busy()
    names = [hall.ask(6, 50 + number) for number in range(40)]
    assert not hall.held, "those who come together are one sign of a queue"
    for number in range(40):
        names.append(hall.ask(6, 100 + number))
        hall.step(1, room=0)
    assert 0 < len(hall.held) < 40
    assert hall.held == names[-len(hall.held) :], "those who came while there was no queue went in"


def test_new_sessions_wait_while_the_room_is_used_up(hall: Hall) -> None:
    busy = hall.shut()
    first, second = hall.ask(4, 1), hall.ask(4, 2)
    assert hall.held == [first, second]
    hall.step(20, room=0)
    assert hall.started == [busy]
    hall.step(2, room=3)
    assert hall.held == [first, second], "it would take more than there is"
    hall.step(2, room=4)
    assert hall.held == [second]
    hall.step(2, room=4)
    assert hall.started == [busy, first, second]
    assert hall.released() == [(first, "room"), (second, "room")]


def test_what_starts_is_taken_off_a_room_that_does_not_know_of_it(hall: Hall) -> None:
    hall.busy()
    before = hall.clock.now
    hall.say(13, known_of=before)
    names = [hall.ask(4, seed) for seed in range(1, 6)]
    assert hall.held == names[3:], "three of four blocks leave one of thirteen"
    for _ in range(30):
        hall.say(13, known_of=before)
        hall.step()
    assert hall.held == names[3:], "scheduled by now, and not known yet"
    hall.step(2, room=4)
    assert hall.held == names[4:]


def test_a_live_and_resident_session_is_never_held(hall: Hall) -> None:
    hall.serve(4, 1, session_id="a")
    hall.shut()
    again = hall.engine.ask(tokens_of(4, 1, longer), 1, session_id="a").request_id
    other = hall.ask(4, 2, session_id="b")
    assert hall.held == [other]
    hall.step(2, room=0)
    assert again in hall.started


def test_parallel_requests_that_go_on_with_a_running_one_are_not_held(hall: Hall) -> None:
    hall.say(None)
    hall.engine.ask(tokens_of(3, 1), 300, session_id="a")
    hall.step(3)
    hall.say(0)
    hall.engine.ask(tokens_of(3, 1, range(2 * BLOCK_SIZE)), 1, session_id="a")
    assert hall.held == []
    other = hall.ask(6, 2, session_id="a")
    assert hall.held == [other], "a subagent's context is new, whatever its name"


@pytest.mark.parametrize("output", [1, 300], ids=["served", "runs"])
def test_a_short_request_brings_in_no_long_one_of_its_name(hall: Hall, output: int) -> None:
    """Else a client would send a little first, under each new name, and never wait."""
    hall.say(None)
    hall.engine.ask(tokens_of(2, 1), output, session_id="a")
    hall.step(5)
    hall.shut()
    new = hall.ask(4, 2, session_id="b")
    long = hall.engine.ask(tokens_of(2, 1, range(9 * BLOCK_SIZE)), 1, session_id="a").request_id
    assert hall.held == [new, long]
    hall.step(2, room=4)
    assert hall.held == [long], "nor does it let one go before others"


def test_a_sidecar_that_dies_lets_all_start_at_once_and_in_order(hall: Hall) -> None:
    hall.serve(4, 1, session_id="a")
    hall.shut()
    names = [hall.ask(2, seed) for seed in range(10, 14)]
    hall.step(5, room=0)
    late = hall.engine.ask(tokens_of(4, 1, [5]), 1, session_id="a").request_id
    assert hall.held == names
    hall.clock.now += 2.5  # nothing was heard for longer than a word is acted on
    hall.step()
    assert hall.held == []
    hall.step(4)
    assert hall.started[2:] in ([late, *names], [*names, late])
    assert [reason for _, reason in hall.released()] == ["silence"] * 4


def test_those_that_wait_stand_in_the_order_of_their_arrival_again(hall: Hall) -> None:
    hall.shut()
    held = [hall.ask(2, seed) for seed in range(10, 13)]
    hall.side.client.hold_admission(None)
    late = hall.ask(2, 20)
    hall.holding.step(0)
    assert [each.request_id for each in hall.engine.scheduler.waiting] == [*held, late]


def test_nobody_is_held_for_longer_than_the_bound(hall: Hall) -> None:
    hall.crowd()
    hall.say(0)
    first = hall.ask(2, 1)
    hall.clock.now += 60
    hall.say(0)
    second = hall.ask(2, 2)
    hall.clock.now += 57
    hall.step(1, room=0)
    assert hall.held == [first, second]
    hall.clock.now += 2.9
    hall.step(2, room=0)
    assert hall.held == [second]
    assert hall.released() == [(first, "bound")]
    assert hall.side.heartbeat(0)[-1].longest_s == pytest.approx(120, abs=0.2)


def test_steps_that_take_long_do_not_make_anybody_wait_longer(hall: Hall) -> None:
    hall.crowd()
    hall.say(0)
    name = hall.ask(2, 1)
    while hall.held:
        hall.clock.now += 1.7
        hall.step(1, room=0)
    assert hall.released() == [(name, "bound")]
    assert 116 < hall.holding.report().longest_s <= 120


def test_an_idle_engine_lets_one_start_after_a_moment(hall: Hall) -> None:
    busy = hall.shut()
    names = [hall.ask(2, seed) for seed in range(1, 4)]
    hall.abort(busy)
    hall.step(10, room=0)
    assert hall.held == names, "a tool may answer any moment"
    hall.step(45, room=0)
    assert hall.held == names[1:]
    assert hall.released() == [(names[0], "idle")]


def test_an_engine_that_was_idle_starts_whoever_comes_first(hall: Hall) -> None:
    hall.clock.now += 10
    hall.say(0)
    first, second = hall.ask(2, 1, output=50), hall.ask(2, 2)
    assert hall.held == [second]
    hall.step(2, room=0)
    assert hall.started == [first]


def test_one_who_waits_for_its_user_does_not_keep_the_engine_busy(hall: Hall) -> None:
    hall.say(None)
    hall.engine.ask(tokens_of(2, 1), 1, resumable=True)
    hall.step(6, room=None)
    assert hall.engine.scheduler.num_waiting_for_streaming_input == 1
    hall.say(0)
    held = hall.ask(2, 2)
    assert hall.held == [held]
    hall.step(80, room=0)
    assert held in hall.started


def test_the_prompt_of_anybody_who_runs_is_work(hall: Hall) -> None:
    hall.say(None)
    hall.ask(4, 1, output=9)
    hall.engine.step()
    hall.engine.step()
    assert not hall.holding.queue.prefills, "its answer is being written"
    hall.ask(4, 2)
    hall.engine.scheduler.schedule()
    assert hall.holding.queue.prefills


def test_a_session_larger_than_the_pool_is_not_held(new_hall: NewHall) -> None:
    hall = new_hall(blocks=17)
    hall.shut()
    hall.ask(16, 1)
    other = hall.ask(4, 2)
    assert hall.held == [other]


def test_what_brings_no_block_is_not_held(hall: Hall) -> None:
    hall.shut()
    hall.engine.ask([1, 2, 3], 1)
    assert hall.held == []


def multi(*parts: tuple[str, str]) -> tuple[str, str, dict[str, Any]]:
    listed = [{"kv_connector": name, "kv_role": role} for name, role in parts]
    return "MultiConnector", "kv_both", {"connectors": listed}


@pytest.mark.parametrize(
    ("user", "believed"),
    [
        (None, False),
        (("NixlConnector", "kv_producer", {}), False),
        (("NixlConnector", "kv_consumer", {}), True),
        (("NixlConnector", "kv_both", {}), True),
        (("SomebodysOwn", "kv_consumer", {}), True),
        (("SomebodysOwn", "kv_both", {}), False),
        (("OffloadingConnector", "kv_both", {}), False),
        (("LMCacheConnectorV1", "kv_both", {}), False),
        (multi(("OffloadingConnector", "kv_both"), ("KvGraphConnector", "kv_both")), False),
        (multi(("OffloadingConnector", "kv_both"), ("MooncakeConnector", "kv_both")), True),
        (("MultiConnector", "kv_both", {"connectors": "none"}), False),
    ],
)
def test_a_prompt_that_another_engine_computed_is_not_held_where_prompts_are_fetched(
    new_hall: NewHall, user: tuple[str, str, dict[str, Any]] | None, believed: bool
) -> None:
    """Anybody can say so; it is believed of an engine whose user's connector fetches prompts."""
    from kvgraph.hooks.vllm.scheduler import _fetches_prompts
    from vllm.config import KVTransferConfig

    hall = new_hall()
    assert not _fetches_prompts(hall.engine.scheduler), "ours alone"
    if user is not None:
        name, role, extra = user
        config = KVTransferConfig(kv_connector=name, kv_role=role, kv_connector_extra_config=extra)
        beside = SimpleNamespace(connector=SimpleNamespace(_kv_transfer_config=config))
        hall.holding._sessions._fetches = _fetches_prompts(beside)  # type: ignore[arg-type]
    hall.shut()
    remote = hall.ask(4, 1, kv_transfer_params={"do_remote_prefill": True})
    assert hall.held == ([] if believed else [remote])


def test_who_says_so_where_none_are_fetched_has_a_new_name_all_the_same(new_hall: NewHall) -> None:
    hall = new_hall()
    hall.serve(4, 1, session_id="a")
    hall.shut()
    said = {"do_remote_prefill": True}
    new = hall.ask(4, 1, session_id="b", kv_transfer_params=said)
    assert hall.held == [new], "though another session's prompt is here"


def test_the_connectors_that_fetch_what_requests_name_are_vllms() -> None:
    """It fails when another of vLLM's connectors reads it: name it where the list is."""
    from kvgraph.hooks.vllm.scheduler import _FETCHERS
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1 import __path__ as places

    reading = {
        file.relative_to(place).parts[0]
        for place in places
        for file in Path(place).rglob("*.py")
        if "do_remote_prefill" in file.read_text()
    }
    loaders = [inspect.getclosurevars(KVConnectorFactory._registry[name]) for name in _FETCHERS]
    modules = [loader.nonlocals["module_path"] for loader in loaders]
    assert {module.split(".v1.")[1].split(".")[0] for module in modules} == reading


def test_a_new_salt_for_each_request_gives_no_more_than_one_tenant_has(new_hall: NewHall) -> None:
    hall = new_hall()
    hall.say(None)
    hall.ask(6, 3000, cache_salt="modest")
    hall.engine.settle()  # it was served once
    hall.shut()
    for number in range(80):
        hall.ask(4, 100 + number, cache_salt=f"new {number}")
    mine = hall.ask(6, 4000, cache_salt="modest")
    assert mine in hall.held
    before = len(hall.started)
    for _ in range(400):
        hall.step(room=0)
        if mine in hall.started:
            break
        hall.clock.now += 0.25
    assert mine in hall.started
    assert len(hall.started) - before <= 4


def test_an_abort_while_held_leaves_nothing_behind(hall: Hall) -> None:
    busy = hall.shut()
    names = [hall.ask(4, seed) for seed in range(1, 5)]
    hall.abort(names[1])
    assert hall.held == [names[0], *names[2:]]
    assert names[1] not in hall.engine.scheduler.requests
    for name in (busy, names[0], *names[2:]):
        hall.abort(name)
    hall.step(3, room=0)
    hall.engine.settle()
    assert hall.engine.is_whole()
    assert not hall.engine.scheduler.deferred_waiting
    assert {reason for _, reason in hall.released()} == {"gone"}
    hall.say(None)
    hall.busy(9001)
    hall.say(4)
    hall.ask(4, 50)
    assert hall.held == [], "none of those who went away takes room"


def test_an_id_that_comes_again_is_another_request(hall: Hall) -> None:
    hall.shut()
    for seed in (1, 2):
        request = hall.engine.make("twice", tokens_of(3, seed), 1)
        hall.engine.outputs["twice"] = []
        hall.engine.scheduler.add_request(request)
        assert hall.held == ["twice"]
        if seed == 1:
            hall.abort("twice")
    hall.step(4, room=5)
    assert hall.started[-1] == "twice"
    hall.step(2, room=None)  # whoever waited would go
    assert hall.released() == [("twice", "gone"), ("twice", "room")]


def test_vllm_counts_and_lists_who_is_held(hall: Hall) -> None:
    from vllm.v1.core.sched.interface import PauseState

    hall.shut()
    names = [hall.ask(2, seed) for seed in range(1, 4)]
    scheduler = hall.engine.scheduler
    assert scheduler.get_request_counts() == (1, 3)
    assert scheduler.get_num_unfinished_requests() == 4
    assert scheduler.has_requests()
    assert set(names) <= set(scheduler.requests)
    assert len(scheduler.deferred_waiting) == 3, "as those that a step skips"
    scheduler.set_pause_state(PauseState.PAUSED_NEW)
    assert scheduler.get_num_unfinished_requests() == 1
    scheduler.set_pause_state(PauseState.UNPAUSED)
    hall.step(2, room=None)
    assert not scheduler.deferred_waiting


def test_what_is_told(hall: Hall, caplog: pytest.LogCaptureFixture) -> None:
    hall.shut()
    with caplog.at_level("INFO", logger="kvgraph.hooks.vllm.holding.holding"):
        salted = hall.ask(4, 1, session_id="a", cache_salt="one")
        hall.ask(3, 2)
        hall.step(3, room=0)
        report = hall.side.heartbeat(0)[-1]
        hall.step(2, room=None)
        hall.clock.now += 11
        hall.step(1, room=None)
    told = [e for e in hall.side.client.outbox if isinstance(e, RequestHeld)]
    first, _ = told
    assert (first.request_id, first.blocks, first.session) == (salted, 4, "a")
    assert first.tenant.startswith("salt-")
    assert (first.fitting, first.live) == (31, 38)
    assert (report.waiting, report.waiting_blocks, report.held, report.not_held) == (2, 7, 2, 1)
    assert report.oldest_s > 0
    assert hall.side.heartbeat(0)[-1].released[HOLD_ENDS.index("open")] == 2
    closed, opened = [record.getMessage() for record in caplog.records]
    assert closed == (
        "kvgraph: new sessions wait: 38 are live where 31 fit; a request is held for 120 s at most"
    )
    assert "start at once again; 2 requests were held" in opened


def test_a_sidecar_that_is_told_anew_hears_who_is_held_now(hall: Hall) -> None:
    hall.shut()
    names = [hall.ask(3, seed, session_id=f"s{seed}") for seed in range(1, 5)]
    hall.abort(names[2])
    hall.step(2, room=3)
    assert hall.held == [names[1], names[3]]
    told = [e for e in hall.side.client.outbox if isinstance(e, RequestHeld)]
    assert hall.side.held() == [told[1], told[3]]
    hall.step(2, room=None)
    assert hall.side.held() == []
    assert hall.side.heartbeat(0)[-1].waiting == 0


def test_who_waited_for_long_starts_where_nobody_else_waits(hall: Hall) -> None:
    """One at a time: the next one a moment after the prompt of the last is computed."""
    hall.shut()
    first, second = hall.ask(20, 1), hall.ask(20, 2)
    hall.clock.now += 9.5
    hall.step(2, room=0)
    assert hall.held == [first, second]
    hall.clock.now += 1.0
    hall.step(room=0)
    assert hall.held == [second]
    hall.step(room=0)
    assert hall.held == [second], "the first one's prompt takes several steps"
    hall.step(10, room=0)
    assert hall.held == []
    assert hall.released() == [(first, "patience"), (second, "patience")]


def test_an_engine_that_had_no_work_for_hours_lets_the_patient_start_as_ever(hall: Hall) -> None:
    """Whoever started last went away with all others, before its prompt was computed."""
    busy = hall.shut()
    last = hall.ask(20, 1)
    hall.clock.now += 10.5
    hall.step(room=0)
    assert hall.released() == [(last, "patience")]
    hall.abort(last)
    hall.abort(busy)
    hall.clock.now += 8 * 3600.0
    hall.busy(9001)
    hall.say(0)
    first = hall.ask(20, 2)
    hall.clock.now += 10.5
    hall.step(room=0)
    assert hall.released()[1:] == [(first, "patience")]


def evict_all(hall: Hall) -> None:
    pool = hall.engine.scheduler.kv_cache_manager.block_pool
    pool.evict_blocks({block.block_id for block in pool.free_block_queue.get_all_free_blocks()})


def test_who_lost_its_context_in_the_queue_waits_like_others(hall: Hall) -> None:
    """It came resident, and stood in vLLM's queue until its blocks were gone."""
    hall.serve(4, 1, session_id="a")
    running = [hall.busy(seed) for seed in range(9000, 9006)]  # as many as run at once
    hall.say(0)
    other = hall.ask(4, 2, session_id="b")
    again = hall.engine.ask(tokens_of(4, 1, longer), 1, session_id="a").request_id
    hall.step(2, room=0)
    assert hall.held == [other]
    evict_all(hall)
    let_in = hall.side.heartbeat(0)[-1].not_held
    hall.step(7, room=0)  # it is asked twenty times a second
    assert hall.held == [other, again]
    report = hall.side.heartbeat(0)[-1]
    assert (report.held, report.not_held) == (2, let_in - 1), "each request is counted once"
    hall.abort(running[0])
    hall.step(4, room=0)
    assert again not in hall.started
    hall.step(20, room=100)
    assert hall.held == []
    assert again in hall.started


def wait_cold(hall: Hall, sessions: str) -> list[str]:
    """Live sessions come back while as many run as may, and lose their contexts in the queue."""
    for seed, name in enumerate(sessions, start=1):
        hall.serve(4, seed, session_id=name)
    for seed in range(9000, 9006):
        hall.busy(seed)
    back = [
        hall.engine.ask(tokens_of(4, seed, longer), 1, session_id=name).request_id
        for seed, name in enumerate(sessions, start=1)
    ]
    hall.engine.ask(tokens_of(6, 90), 1, session_id="new")
    evict_all(hall)
    return back


def test_all_that_the_next_step_could_take_are_asked_about_at_once(hall: Hall) -> None:
    """A step takes several from the queue, and each of them evicts what another needs."""
    back = wait_cold(hall, "abc")
    hall.step(1, room=0)
    assert [name for name in hall.held if name in back] == back


def test_what_the_queue_will_compute_again_is_reported_while_it_is_long(hall: Hall) -> None:
    hall.step(1, room=None)
    assert hall.side.heartbeat(0)[-1].queued_blocks == 0
    wait_cold(hall, "abc")
    hall.clock.now += 1.0
    hall.step(1, room=None)
    report = hall.side.heartbeat(0)[-1]
    assert (report.queued_blocks, report.queued_again) == (3 * 9 + 6, 3 * 4)
    hall.step(1, room=0)
    assert hall.side.heartbeat(0)[-1].queued_blocks == 0, "who lost its context is held by now"


def test_the_queue_is_counted_twice_a_second_at_most(hall: Hall) -> None:
    """Each count looks at up to 32 prompts, and the sidecar hears of it every 0.4 s."""
    wait_cold(hall, "abc")
    hall.clock.now += 1.0
    hall.step(1, room=None)
    hall.ask(6, 91)
    hall.step(45, room=None)
    assert hall.side.heartbeat(0)[-1].queued_blocks == 3 * 9 + 6
    hall.step(10, room=None)
    assert hall.side.heartbeat(0)[-1].queued_blocks == 3 * 9 + 2 * 6


@pytest.fixture(params=itertools.product(("fcfs", "priority"), (False, True)), ids=str)
def any_hall(request: pytest.FixtureRequest, paper_config: Any) -> Iterator[Hall]:
    order, asynchronous = request.param
    config = by_priority(paper_config) if order == "priority" else paper_config
    with closing(PaperEngine(config, shape(asynchronous=asynchronous), clock=Clock())) as engine:
        yield Hall(engine)


def break_at(hall: Hall, where: str) -> None:
    if where == "lookup":
        hall.side.observer.request_looked_up = fail
    elif where == "allocation":
        hall.side.observer.request_scheduled = fail
    else:
        hall.holding.update_state_after_alloc = fail
        hall.engine.rewire()


@pytest.mark.parametrize("where", ["lookup", "allocation", "admission"])
def test_an_error_while_one_is_scheduled_puts_no_older_one_in_its_place(
    any_hall: Hall, where: str
) -> None:
    """vLLM has looked at the head and not taken it out yet: what was held stood before it."""
    engine = any_hall.engine
    any_hall.say(None)
    any_hall.ask(4, 1, session_id="a")
    engine.settle()
    any_hall.shut()
    held = [any_hall.ask(6, 2), any_hall.ask(3, 3)]
    again = engine.ask(tokens_of(4, 1, longer), 3, session_id="a").request_id
    assert any_hall.held == held, "older than the one that may start"
    break_at(any_hall, where)
    any_hall.step(1, room=0)
    assert engine.side is None, "ours is out of the way"
    assert again in {each.request_id for each in engine.scheduler.running}
    engine.settle()
    assert [len(engine.outputs[name]) for name in (*held, again)] == [1, 1, 3]
    assert type(engine.scheduler.waiting).__name__ != "HoldingQueue"
    assert engine.is_whole()


@pytest.mark.parametrize("all_at_once", [False, True])
def test_nobody_is_lost_where_telling_of_the_held_fails(any_hall: Hall, all_at_once: bool) -> None:
    engine = any_hall.engine
    any_hall.shut()
    held = [any_hall.ask(6, 2), any_hall.ask(3, 3)]
    assert any_hall.held == held
    engine.scheduler.waiting.queued = [fail]
    any_hall.step(1, room=None if all_at_once else 99)
    engine.settle()
    assert [len(engine.outputs[name]) for name in held] == [1, 1]
    assert engine.is_whole()


def test_who_was_held_can_go_away_between_an_error_and_vllms_next_look(any_hall: Hall) -> None:
    any_hall.shut()
    first, second = any_hall.ask(4, 1), any_hall.ask(4, 2)
    any_hall.holding.end()
    late = any_hall.ask(2, 3)
    assert any_hall.engine.scheduler.get_request_counts() == (1, 3)
    any_hall.abort(first)
    any_hall.engine.settle()
    assert [len(any_hall.engine.outputs[name]) for name in (first, second, late)] == [0, 1, 1]
    assert not any_hall.engine.scheduler.deferred_waiting
    assert any_hall.engine.is_whole()


BLOCKS = 8


@pytest.fixture
def tiered(new_hall: NewHall) -> Hall:
    """An engine with tiers, whose prompt of seed 1 has copies only."""
    hall = new_hall(warm=256)
    hall.say(None)
    park(hall.engine, text(BLOCKS, 1))
    return hall


def suggest(hall: Hall) -> None:
    """The sidecar would have the prompt of seed 1 back."""
    client, none = hall.side.client, as_keys(b"")
    hashes = hall.engine.make("probe", text(BLOCKS, 1), 1).block_hashes[:BLOCKS]
    client.hold_ranking(EvictionRanking(1, hall.clock.now + 1e6, none, none, none, none))
    client.hold_wanted(np.array([key_of(each) for each in hashes], dtype=np.uint64))


@pytest.mark.parametrize("waiting", [0, 40])
def test_a_full_hall_takes_no_room_from_prefetches(tiered: Hall, waiting: int) -> None:
    tiered.shut()
    names = []
    for number in range(waiting):
        tiered.saturate()
        names.append(tiered.ask(6, 50 + number))
    assert tiered.held == names
    suggest(tiered)
    for _ in range(10):
        tiered.step(room=0)
        tiered.engine.finish_copies()
    assert tiered.held == names
    assert tiered.side.bridge.ledger.counts.prefetched == BLOCKS


def test_who_is_released_wants_room(tiered: Hall) -> None:
    line = tiered.side.bridge.line
    tiered.shut()
    name = tiered.ask(6, 50)
    assert line.needed == 0
    tiered.step(room=0)
    assert line.needed == 0
    tiered.step(room=20)
    assert tiered.held == []
    assert line.needed == 7, "its prompt's blocks and one for its answer"
    tiered.step(2, room=20)
    assert name in tiered.started
    assert line.needed == 0


def test_who_is_held_at_its_turn_wants_none_until_then(tiered: Hall) -> None:
    line = tiered.side.bridge.line
    tiered.crowd()
    queue = tiered.holding.queue
    (head,) = queue.next_requests(9)
    name = head.request_id
    assert line.needed > 0
    queue.hold(head)
    assert line.needed == 0
    queue.release(name)
    assert line.needed > 0


def test_who_goes_away_while_held_wants_nothing(tiered: Hall) -> None:
    tiered.shut()
    tiered.abort(tiered.ask(6, 50))
    assert tiered.held == []
    assert tiered.side.bridge.line.needed == 0


def test_a_large_newcomer_waits_no_longer_than_three_times_as_long_as_small_ones(
    paper_config: Any,
) -> None:
    large, small = waits(paper_config, 500.0, seed=2)
    assert len(large) >= 2
    assert max(large) <= HOLD_MAX_S
    assert max(large) <= 3.0 * np.quantile(small, 0.95)


BY_DEFAULT = EngineSettings.model_fields["admission"].default


@pytest.mark.parametrize(
    ("text", "on"), [("1", True), ("auto", True), ("", BY_DEFAULT), ("0", False), ("off", False)]
)
def test_the_switch(monkeypatch: pytest.MonkeyPatch, text: str, on: bool) -> None:
    monkeypatch.setenv(ADMISSION_VARIABLE, text)
    assert engine_settings().admission is on
    monkeypatch.delenv(ADMISSION_VARIABLE)
    assert engine_settings().admission is BY_DEFAULT


def test_what_people_are_told_of_the_default_is_so() -> None:
    told = (Path(__file__).parents[4] / "docs/admission.md").read_text()
    assert f"`{ADMISSION_VARIABLE}={int(not BY_DEFAULT)}`" in told
    assert f"`{ADMISSION_VARIABLE}={int(BY_DEFAULT)}`" not in told


@pytest.mark.parametrize(
    ("text", "seconds"), [("", 300.0), ("7.5", 7.5), ("0", 0.0), ("-1", 300.0), ("soon", 300.0)]
)
def test_the_bound(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, text: str, seconds: float
) -> None:
    monkeypatch.setenv(HOLD_MAX_VARIABLE, text)
    assert engine_settings("hold_max_s").hold_max_s == seconds
    assert EngineSettings().hold_max_s == HOLD_MAX_S
    assert len(caplog.records) == (text in ("-1", "soon"))
    assert all(HOLD_MAX_VARIABLE in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_schedulers_that_are_made_hold_where_it_is_switched_on(
    paper: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    original = Scheduler.__init__
    monkeypatch.setenv(ADMISSION_VARIABLE, "0")
    follow_schedulers()
    assert Scheduler.__init__ is original, "off, nothing of vLLM's is touched"
    monkeypatch.delenv(ADMISSION_VARIABLE)
    follow_schedulers()
    follow_schedulers()
    engine = paper(shape(asynchronous=asynchronous))
    assert engine.side.holding is not None
    assert len(engine.serve([1, 2, 3], 4)) == 4


def slowed(hall: Hall, step_s: float = 0.02, token_s: float = 1 / 128) -> Callable[..., None]:
    """Has each step take so long, and so long for each of its tokens; returns how to take some."""
    ended = hall.engine.end

    def end(batch: Batch) -> None:
        hall.clock.now += step_s + token_s * batch.order.total_num_scheduled_tokens
        ended(batch)

    def steps(count: int, room: int | None = 0) -> None:
        for _ in range(count):
            hall.say(room)
            hall.engine.step()

    hall.engine.end = end
    return steps


def prompts_limit(hall: Hall) -> int:
    """Tokens of a step that vLLM gives to one prompt at most; 0: any number."""
    return int(hall.engine.scheduler.scheduler_config.long_prefill_token_threshold)


def measured(hall: Hall, steps: Callable[..., None]) -> None:
    """Sessions crowd, and the engine has computed a long prompt meanwhile."""
    hall.busy()
    steps(10)
    assert prompts_limit(hall) == 0, "nothing is known of prompts"
    name = hall.ask(28, 7000)
    steps(1, 28)
    steps(20)
    assert len(hall.engine.outputs[name]) == 1


def test_a_long_prompt_leaves_a_slow_step_to_others_while_sessions_crowd(hall: Hall) -> None:
    hall.serve(4, 1, session_id="live")
    steps = slowed(hall)
    measured(hall, steps)
    limit = prompts_limit(hall)
    assert 12 <= limit <= 20, "an eighth of a second is 16 tokens"
    long = hall.ask(28, 2)
    steps(1, 28)
    steps(2)
    turn, asked = hall.ask(4, 1, session_id="live"), hall.clock.now
    while not hall.engine.outputs[turn]:
        steps(1)
    assert hall.clock.now - asked < 0.9, "one of vLLM's own steps takes a second"
    assert not hall.engine.outputs[long]
    steps(448 // limit + 2)
    assert len(hall.engine.outputs[long]) == 1
    steps(2, None)
    assert prompts_limit(hall) == 0


@pytest.mark.parametrize(
    ("step_s", "token_s"), [(0.02, 1 / 1280), (1.2, 1 / 128)], ids=["fast", "fast beside a step"]
)
def test_no_prompt_is_limited_where_that_would_not_pay(
    hall: Hall, step_s: float, token_s: float
) -> None:
    measured(hall, slowed(hall, step_s, token_s))
    assert prompts_limit(hall) == 0


@pytest.mark.parametrize("ended", [False, True], ids=["few requests queue", "holding has ended"])
def test_no_prompt_is_limited_any_more_once(new_hall: NewHall, ended: bool) -> None:
    hall = new_hall()
    steps = slowed(hall)
    measured(hall, steps)
    assert prompts_limit(hall)
    if ended:
        hall.holding.end()
    else:
        for _ in range(200):
            hall.holding.saturation.note_arrival(queued=False)
        steps(1)
    assert prompts_limit(hall) == 0


def test_what_an_engine_took_until_more_was_asked_is_no_step(hall: Hall) -> None:
    steps = slowed(hall)
    measured(hall, steps)
    limit = prompts_limit(hall)
    for number in range(20):
        hall.serve(4, 100 + number)
        hall.clock.now += 5.0
    hall.busy(9100)
    steps(20)
    assert prompts_limit(hall) >= 0.8 * limit


def test_a_limit_that_an_operator_set_stays(paper: Callable[..., Any]) -> None:
    engine = paper(shape(), clock=Clock())
    engine.scheduler.scheduler_config.long_prefill_token_threshold = 100
    hall = Hall(engine)
    hall.busy()
    hall.ask(28, 7000)
    steps = slowed(hall)
    steps(1, 28)
    steps(20)
    assert prompts_limit(hall) == 100


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("enable_chunked_prefill", False),
        ("max_num_encoder_input_tokens", 2048),
        ("need_mamba_block_aligned_split", True),
    ],
)
def test_a_prompt_that_vllm_may_not_split_anywhere_is_not_limited(
    paper: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, part: str, value: int
) -> None:
    engine = paper(shape(), clock=Clock())
    owners = engine.scheduler, engine.scheduler.scheduler_config
    owner = next(each for each in owners if hasattr(each, part))
    with monkeypatch.context() as patch:  # the engine on paper serves no such model
        patch.setattr(owner, part, value)
        hall = Hall(engine)
    measured(hall, slowed(hall))
    assert prompts_limit(hall) == 0


def test_vllm_asks_its_own_queue_while_nobody_is_held(any_hall: Hall) -> None:
    scheduler = any_hall.engine.scheduler
    own = scheduler.waiting
    assert not isinstance(own, HoldingQueue)
    any_hall.shut()
    held = [any_hall.ask(4, seed) for seed in (1, 2)]
    assert isinstance(scheduler.waiting, HoldingQueue)
    any_hall.abort(held[0])
    assert isinstance(scheduler.waiting, HoldingQueue)
    any_hall.step(1, room=99)
    assert any_hall.held == []
    assert scheduler.waiting is own
    any_hall.engine.settle()
    assert len(any_hall.engine.outputs[held[1]]) == 1


def test_after_an_error_of_ours_nothing_is_asked_of_us_any_more(any_hall: Hall) -> None:
    queue, own = any_hall.holding.queue, any_hall.engine.scheduler.waiting
    any_hall.holding.end()
    queue.add_request = fail
    assert any_hall.engine.scheduler.waiting is own
    assert own.add_request.__self__ is own
    assert len(any_hall.engine.serve([1, 2, 3], 4)) == 4


def test_a_scheduler_that_lacks_a_part_goes_on_without(
    paper: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    engine = paper(shape())
    del engine.scheduler.deferred_waiting
    with pytest.raises(TypeError, match="deferred_waiting"):
        bind_scheduler(engine.scheduler)
    assert engine.side.holding is None


def test_a_scheduler_of_somebody_elses_making_keeps_its_queue(paper: Callable[..., Any]) -> None:
    """It may rely on its queue's being a deque."""
    engine = paper(shape())
    own = type(engine.scheduler)
    engine.scheduler.__class__ = type("Theirs", (own,), {"__module__": "theirs.schedulers"})
    with pytest.raises(TypeError, match="Theirs is not one of vLLM's own schedulers"):
        bind_scheduler(engine.scheduler)
    assert not isinstance(engine.scheduler.waiting, HoldingQueue)


def test_a_scheduler_of_nobody_ours_is_left_alone(paper: Callable[..., Any]) -> None:
    engine = paper(shape().__class__(stock=True))
    bind_scheduler(engine.scheduler)
    assert not isinstance(engine.scheduler.waiting, HoldingQueue)
