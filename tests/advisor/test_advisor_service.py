"""A whole sidecar, with hand-rolled engines on real sockets."""

from __future__ import annotations

import gc
import json
import re
import stat
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from hand_clock import Clock
from kvgraph.advisor.page.page import FRESH_S, STALE_S, WAITING, QueryGate, RecentAnswers
from kvgraph.advisor.service import Service, serve
from kvgraph.advisor.sockets import front
from kvgraph.advisor.sockets.subscriber import engine_id
from kvgraph.dashboards.source import BusyError
from kvgraph.graph.errors import ConfigError
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.ranking.policy import Weighted
from kvgraph.graph.types import Tier, as_keys
from kvgraph.graph.wire import frames as wire
from kvgraph.graph.wire.advice import (
    AnyAdvice,
    EvictionRanking,
    PrefetchMessage,
    ResyncRequest,
    StillValid,
)
from kvgraph.graph.wire.events import (
    BlocksLoaded,
    BlocksRemoved,
    BlocksSpilled,
    BlocksStored,
    Pressure,
    RequestFinished,
    RequestHeld,
    RequestReleased,
    RequestStarted,
)
from sidecar_ends import Dealer, Serving
from waiting import PATIENCE_S, until
from wire_keys import pack

PRESSURE = Pressure(100, 50, 50, 1, 0)


class Engine(Dealer):
    """One that stays alive while it waits for advice."""

    def advice(self, *kinds: type) -> AnyAdvice:
        """The next advice of one of ``kinds``; sends its pressure while it waits."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            if not self.socket.poll(200):
                self.send(PRESSURE)
                continue
            advice = wire.decode_advice(self.socket.recv_multipart(), now=0.0)[1]
            if isinstance(advice, kinds):
                return advice
        raise AssertionError(f"no {kinds} arrived")

    def ranking(self, condition: Callable[[set[int]], bool]) -> EvictionRanking:
        while True:
            advice = self.advice(EvictionRanking)
            assert isinstance(advice, EvictionRanking)
            if condition(set(advice.order.tolist())):
                return advice


class Running(Serving):
    """A service in a thread, and what it says of itself over HTTP."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        super().__init__(settings.pop("sidecar__endpoint", f"ipc://{directory}/s"), **settings)

    def get(self, path: str) -> Any:
        request = urllib.request.Request(self.service.http + path)
        request.add_header("Authorization", f"Bearer {self.service.token}")
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.loads(answer.read())

    def until(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            status: dict[str, Any] = self.get("/status")
            if condition(status):
                return status
            assert time.monotonic() < deadline, status
            time.sleep(0.02)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    with ExitStack() as stack:

        def begin(**settings: Any) -> Running:
            running = Running(tmp_path, **settings)
            stack.callback(running.stop)
            return running

        yield begin


def ranked(engine: Engine) -> Engine:
    """An engine with a block that it was told to evict."""
    engine.greet([1])
    engine.ranking(lambda keys: keys == {1})
    return engine


@pytest.fixture
def connect(start: Callable[..., Running]) -> Iterator[Callable[..., Engine]]:
    context, engines = zmq.Context[Any](), list[Engine]()

    def begin(running: Running, name: str = "engine") -> Engine:
        engines.append(Engine(context, running.service.endpoint, name))
        return engines[-1]

    yield begin
    context.destroy(linger=0)


Start = Callable[..., Running]
Connect = Callable[..., Engine]


def test_an_engine_gets_a_ranking_of_its_blocks(start: Start, connect: Connect) -> None:
    engine = connect(start())
    engine.greet([1, 2])
    engine.send(BlocksStored(pack(3, 4, 5), 2, 16, "chat"))
    ranking = engine.ranking(lambda keys: keys == {1, 2, 3, 4, 5})
    order = ranking.order.tolist()
    assert order.index(5) < order.index(4) < order.index(3), "a chain goes tail first"
    assert not len(ranking.protected)
    valid = engine.advice(StillValid)
    assert isinstance(valid, StillValid)
    assert valid.epoch == ranking.epoch
    assert valid.age_s < 2.0


def park(engine: Engine, keys: list[int], session: str, expected_return_s: float) -> None:
    """A turn that waits for a tool, and whose blocks the engine copies and then evicts."""
    chain, tokens = pack(*keys), 16 * len(keys)
    engine.send(
        RequestStarted(session, chain, tokens, 0, 16, session),
        BlocksStored(chain, None, 16, session),
        RequestFinished(
            session, chain, tokens, tokens, "stop", session,
            waiting_for_tool=True, expected_return_s=expected_return_s,
        ),
        BlocksSpilled(chain, int(Tier.WARM), 4096),
        BlocksRemoved(chain),
    )  # fmt: skip


def test_a_session_that_is_due_is_brought_back_until_there(start: Start, connect: Connect) -> None:
    running = start()
    engine, other = connect(running, "engine"), connect(running, "other")
    engine.greet()
    other.greet()
    park(engine, [7, 8, 9], "agent", expected_return_s=30.0)
    engine.ranking(lambda keys: not keys)
    park(engine, [1, 2], "soon", expected_return_s=1.0)
    assert engine.advice(PrefetchMessage) == PrefetchMessage(pack(1, 2))
    engine.send(BlocksLoaded(pack(1)))
    wanted = engine.advice(PrefetchMessage)
    while wanted == PrefetchMessage(pack(1, 2)):  # said again until the sidecar knew
        wanted = engine.advice(PrefetchMessage)
    assert wanted == PrefetchMessage(pack(2))
    engine.send(BlocksLoaded(pack(2)))
    while wanted == PrefetchMessage(pack(2)):
        wanted = engine.advice(PrefetchMessage)
    assert wanted == PrefetchMessage(b"")
    while other.socket.poll(0):
        _, advice = wire.decode_advice(other.socket.recv_multipart(), now=0.0)
        assert not isinstance(advice, PrefetchMessage), "these are not its copies"


def test_prefetching_can_be_switched_off_while_running(
    tmp_path: Path, start: Start, connect: Connect
) -> None:
    file = tmp_path / "kvgraph.toml"
    file.write_text("[prefetch]\nmax_blocks = 1\n")
    running = start(path=file)
    engine = connect(running)
    engine.greet()
    park(engine, [1, 2], "soon", expected_return_s=30.0)
    file.write_text("[prefetch]\nhorizon_s = 60.0\nmax_blocks = 1\n")
    running.service.reload()
    assert engine.advice(PrefetchMessage) == PrefetchMessage(pack(1))
    file.write_text("[prefetch]\nenabled = false\n")
    running.service.reload()
    wanted = engine.advice(PrefetchMessage)
    while wanted == PrefetchMessage(pack(1)):
        wanted = engine.advice(PrefetchMessage)
    assert wanted == PrefetchMessage(b"")


def test_a_ranking_says_what_it_knows(start: Start, connect: Connect) -> None:
    engine = connect(start())
    engine.greet([1, 2])
    assert engine.ranking(lambda keys: keys == {1, 2}).heard >= 1
    engine.send(BlocksStored(pack(3), None, 16))
    sent = engine.seq
    assert engine.ranking(lambda keys: keys == {1, 2, 3}).heard >= sent


def test_a_silent_engine_is_forgotten_and_the_other_is_not(start: Start, connect: Connect) -> None:
    running = start(sidecar__engine_timeout_s=1.0)
    quiet, lively = connect(running, "quiet"), connect(running, "lively")
    quiet.greet([1])
    lively.greet([2])

    def one_is_lost(status: dict[str, Any]) -> bool:
        lively.send(PRESSURE)
        time.sleep(0.1)  # nobody is judged silent while messages wait
        return bool(status["counters"]["ingest"].get("engines_lost") == 1)

    status = running.until(one_is_lost)
    assert [engine["name"] for engine in status["engines"]] == ["lively"]
    running.until(lambda s: set(s["graph"]["engines"]) == {engine_id(lively.identity)})
    quiet.send(PRESSURE)
    assert quiet.advice(ResyncRequest) == ResyncRequest("unknown engine")
    quiet.greet([1])
    quiet.ranking(lambda keys: keys == {1})


def test_an_engine_whose_connection_is_gone_is_forgotten_before_it_is_silent(
    start: Start, connect: Connect
) -> None:
    running = start(sidecar__engine_timeout_s=60.0)
    gone, other = connect(running), connect(running)
    gone.greet([1, 2])
    other.greet([3])
    running.until(lambda s: len(s["engines"]) == 2)
    gone.socket.close(linger=0)
    running.until(lambda s: set(s["graph"]["engines"]) == {engine_id(other.identity)})
    other.send(BlocksStored(pack(4), 3, 16))
    other.ranking(lambda keys: keys == {3, 4})


def test_garbage_does_not_stop_the_loop(start: Start, connect: Connect) -> None:
    running = start()
    vandal, engine = connect(running), connect(running)
    for frames in ([b""], [b"a", b"b"], [b"x"] * 100, [wire.HEADER, b"\0" * 8, b"\xc1"]):
        vandal.socket.send_multipart(frames)
    # decodes, and means nothing: keys that are not whole, a chain that is its own parent
    vandal.greet()
    vandal.send(BlocksStored(b"\1\2\3", None, 16), BlocksStored(pack(7), 7, 16))
    engine.greet([1])
    engine.ranking(lambda keys: keys == {1})
    assert running.get("/status")["counters"]["ingest"]["refused_wire"] == 4


def test_a_sidecar_that_serves_collects_garbage_seldom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, seen = gc.get_threshold(), list[tuple[int, int, tuple[int, int, int]]]()
    run = Service.run

    def noted(service: Service) -> None:
        seen.append((gc.get_freeze_count(), len(gc.get_objects()), gc.get_threshold()))
        service.stop()
        run(service)

    monkeypatch.setattr(Service, "run", noted)
    monkeypatch.setattr("kvgraph.advisor.service.signal.signal", lambda *_: None)
    try:
        serve(None, {"sidecar.endpoint": f"ipc://{tmp_path}/s", "http.port": 0}, None)
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
    ((frozen, looked_at, threshold),) = seen
    assert frozen > 10_000
    assert looked_at < 10_000, "what it has loaded is left out"
    assert threshold[0] >= 50_000, "a batch of events makes thousands of objects"
    assert min(threshold[1:]) >= 20, "the older ones are looked at less than once in so many times"


def test_a_frame_beyond_the_limit_ends_its_connection_alone(start: Start, connect: Connect) -> None:
    running = start()
    vandal, engine = connect(running), connect(running)
    engine.greet([1])
    with vandal.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED) as cut:
        vandal.socket.send_multipart([wire.HEADER, bytes(8), bytes(wire.MAX_FRAME_BYTES + 1)])
        assert cut.poll(10_000), "it was read"
        vandal.socket.disable_monitor()
    engine.ranking(lambda keys: keys == {1})
    assert running.get("/status")["counters"]["ingest"].get("refused_wire", 0) == 0


def test_a_peer_fills_no_more_than_a_bounded_number_of_messages(tmp_path: Path) -> None:
    with zmq.Context() as context, front.new_router(context) as router:
        router.bind(f"ipc://{tmp_path}/s")
        with context.socket(zmq.DEALER) as flood:
            flood.setsockopt(zmq.LINGER, 0)
            flood.setsockopt(zmq.SNDHWM, 1)
            flood.connect(f"ipc://{tmp_path}/s")
            sent = 0
            while flood.poll(500, zmq.POLLOUT):
                flood.send(bytes(1 << 20), zmq.NOBLOCK)
                sent += 1
                assert sent < 2 * front.RCVHWM, "nobody reads, and still it takes more"


def test_a_graph_that_fails_costs_a_resync_and_not_the_loop(
    start: Start, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = start()
    engine = ranked(connect(running))
    with monkeypatch.context() as broken:
        broken.setattr(running.service.graph, "slices", _fail)
        engine.send(PRESSURE)
        running.until(lambda s: s["counters"]["ingest"].get("apply_failed", 0) > 0)
        running.until(lambda s: s["engines"][0]["state"] == "resyncing")
    engine.advice(ResyncRequest)
    engine.greet([2])
    engine.ranking(lambda keys: keys == {2})


@pytest.mark.parametrize("step", ["receive", "publish", "expire"])
def test_a_step_that_fails_costs_its_turn_and_not_the_loop(
    start: Start, connect: Connect, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    running = start(sidecar__engine_timeout_s=60.0)  # it is silent while the step fails
    engine = ranked(connect(running))
    parts = running.service.parts
    with monkeypatch.context() as broken:
        broken.setattr(parts.publisher if step == "publish" else parts.subscriber, step, _fail)
        engine.send(PRESSURE)
        running.until(lambda s: s["counters"]["ingest"].get("turns_failed", 0) >= 2)
    engine.send(BlocksStored(pack(2), 1, 16))
    engine.ranking(lambda keys: keys == {1, 2})


def test_health_tells_when_advice_grows_stale(
    start: Start, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = start(sidecar__max_stale_s=0.2)
    engine = ranked(connect(running))
    monkeypatch.setattr(running.service.graph, "rank", _fail)
    engine.send(BlocksStored(pack(2), 1, 16))
    until(lambda: engine.send(PRESSURE) or not running.service.status.is_healthy())
    with pytest.raises(urllib.error.HTTPError, match="503"):
        running.get("/healthz")


def _fail(*_: object) -> None:
    raise ZeroDivisionError("no luck")


def test_the_socket_is_its_owners_only_and_goes_with_the_sidecar(tmp_path: Path) -> None:
    running = Running(tmp_path)
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) & 0o177 == 0
    running.stop()
    assert not (tmp_path / "s").exists()


def test_a_second_sidecar_does_not_take_the_socket_away(start: Start, connect: Connect) -> None:
    running = start()
    with pytest.raises(ConfigError, match="another sidecar serves it"):
        start()
    ranked(connect(running))


def test_the_socket_of_a_killed_sidecar_is_taken_over(
    tmp_path: Path, start: Start, connect: Connect
) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as dead:
        dead.bind(f"ipc://{tmp_path}/dead")
        (tmp_path / "s").hardlink_to(tmp_path / "dead")
    assert (tmp_path / "s").exists()
    ranked(connect(start()))


def stored(seq: int, *keys: int, **more: Any) -> list[bytes]:
    """A batch of vLLM's own publisher."""
    event = {"type": "BlockStored", "block_hashes": keys, "parent_block_hash": None,
             "token_ids": [], "block_size": 16, **more}  # fmt: skip
    return [b"", seq.to_bytes(8, "big"), msgspec.msgpack.encode([1.0, [event], 0])]


def test_an_engine_without_our_hook_is_watched_by_kv_events(tmp_path: Path, start: Start) -> None:
    endpoint = f"ipc://{tmp_path}/kv"
    with zmq.Context() as context, context.socket(zmq.XPUB) as publisher:
        publisher.setsockopt(zmq.LINGER, 0)
        publisher.bind(endpoint)
        running = start(sidecar__observe=[{"endpoint": endpoint, "model": "m"}])
        assert publisher.poll(10_000)
        publisher.send_multipart(stored(0, 5, 6, token_ids=[31337] * 32, session_id="watched"))
        running.until(lambda s: s["graph"]["blocks"] == 2)
        status = running.until(lambda s: s["engines"][0]["state"] == "synced")
        (engine,) = status["engines"]
        assert (engine["kind"], engine["ranked_by"]) == ("kv_events", "lru")
        assert engine["graph"]["resident"] == 2
        assert running.get("/sessions/watched/explain")["blocks"] == 2
        explained = running.get("/blocks/5/explain")
        assert explained["model"] == engine["model"] == "m"
        assert "31337" not in json.dumps(explained)
    running.until(lambda s: s["engines"][0]["state"] == "waiting")
    running.until(lambda s: s["graph"]["engines"] == {})


def test_a_watched_engine_that_cannot_be_followed_costs_its_own_picture(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zmq.Context() as context, ExitStack() as opened:
        publishers = [opened.enter_context(context.socket(zmq.XPUB)) for _ in range(2)]
        for number, publisher in enumerate(publishers):
            publisher.setsockopt(zmq.LINGER, 0)
            publisher.bind(f"ipc://{tmp_path}/kv{number}")
        observe = [{"endpoint": f"ipc://{tmp_path}/kv{number}"} for number in range(2)]
        running = start(sidecar__observe=observe)
        assert all(publisher.poll(10_000) for publisher in publishers)

        def residents(status: dict[str, Any]) -> list[int]:
            return [(each["graph"] or {}).get("resident", 0) for each in status["engines"]]

        publishers[0].send_multipart(stored(0, 1, 2))
        publishers[1].send_multipart(stored(0, 3))
        running.until(lambda s: residents(s) == [2, 1])
        first = running.service.parts.sources[0]
        with monkeypatch.context() as broken:
            broken.setattr(first, "receive", _fail)
            running.until(lambda s: s["counters"]["ingest"].get("watch_failed", 0) >= 1)
            publishers[1].send_multipart(stored(1, 4))
            running.until(lambda s: residents(s) == [0, 2])
        publishers[0].send_multipart(stored(1, 5))
        publishers[0].send_multipart(stored(2, 6, block_size=0))
        status = running.until(lambda s: residents(s) == [1, 2] and s["engines"][0]["left_out"])
        assert [each["state"] for each in status["engines"]] == ["partial", "synced"]
        assert "block_size" in status["engines"][0]["last_left_out"]
        assert status["engines"][0]["silent_s"] < 60


@pytest.mark.parametrize(("guard", "ranked_by"), [(False, "classic"), (True, "lru")])
def test_an_engine_says_by_name_who_ranks(
    start: Start, connect: Connect, guard: bool, ranked_by: str
) -> None:
    running = start(policy__name="classic", policy__guard=guard)
    connect(running).greet([1])
    status = running.until(lambda s: len(s["engines"]) == 1)
    assert status["engines"][0]["ranked_by"] == ranked_by


def test_weights_are_reloaded_while_running(tmp_path: Path, start: Start, connect: Connect) -> None:
    file = tmp_path / "kvgraph.toml"
    file.write_text("[score]\nage = 1.0\n")
    running = start(path=file)
    engine = connect(running)
    engine.greet([1])
    file.write_text("[score]\nage = wrong\n")
    running.service.reload()
    running.until(lambda s: s["config"]["error"] is not None)
    policy = running.service.graph.policy
    assert isinstance(policy, Weighted)
    assert policy.weights.age == 1.0
    file.write_text("[score]\nage = 77.0\n")
    running.service.reload()
    running.until(lambda s: s["counters"]["config"].get("reloaded") == 1)
    assert running.service.graph.policy is policy, "what it learned stays"
    assert policy.weights.age == 77.0
    former = running.service.parts.shadows.otherwise
    assert former is not None, "those before go on in a shadow"
    assert former.weights == replace(policy.weights, age=1.0)
    engine.ranking(lambda keys: keys == {1})


def test_the_graph_survives_a_restart(tmp_path: Path, start: Start, connect: Connect) -> None:
    snapshot = tmp_path / "graph.kvg"
    first = start(sidecar__snapshot_path=snapshot)
    engine = connect(first)
    engine.greet()
    engine.send(BlocksStored(pack(11, 12), None, 16, "chat"))
    engine.ranking(lambda keys: keys == {11, 12})
    engine.close()
    first.stop()
    second = start(sidecar__snapshot_path=snapshot)
    assert second.get("/blocks/12/explain")["session"] == "chat"
    assert second.get("/status")["counters"]["snapshot"]["restored"] == 1
    assert second.get("/status")["graph"]["engines"] == {}


def test_a_session_that_waits_for_room_can_be_asked_about(start: Start, connect: Connect) -> None:
    running = start()
    engine = connect(running)
    engine.greet([1])
    engine.send(RequestHeld("r1", 5, session="fresh", tenant="acme"))
    status = running.until(lambda s: bool(s["engines"]) and bool(s["engines"][0]["room"]))
    (facts,) = status["engines"]
    assert facts["room"]["room_blocks"] is None
    (why,) = running.get("/sessions/fresh/explain")["why"]
    assert re.fullmatch(r"held \d+ s: [\d,]+ agents fit, 0 are live", why)
    with pytest.raises(urllib.error.HTTPError):
        running.get("/sessions/fresh/explain?tenant=other")
    engine.send(RequestReleased("r1", 1.0, "gone"))
    running.until(lambda _: _is_unknown(running, "/sessions/fresh/explain"))


def _is_unknown(running: Running, path: str) -> bool:
    try:
        running.get(path)
    except urllib.error.HTTPError as error:
        return error.code == 404
    return False


class Sleeping(Clock):
    def __init__(self) -> None:
        super().__init__(0.0)
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def test_after_a_question_the_graph_is_left_alone() -> None:
    clock = Sleeping()
    questions = QueryGate(threading.RLock(), clock, clock.sleep, clock)
    with questions.turn():
        clock.now += 0.1
    with questions.turn():
        pass
    assert clock.slept == [pytest.approx(0.3)]


def test_who_asks_alone_is_not_refused_for_a_question_that_was_held_up() -> None:
    clock = Sleeping()
    questions = QueryGate(threading.RLock(), clock, clock.sleep, worked=lambda: 0.0)
    with questions.turn():
        clock.now += 5.0
    with questions.turn():
        pass
    assert (clock.slept, questions.refused) == ([], 0)


def test_who_would_wait_for_too_long_is_refused() -> None:
    clock = Sleeping()
    questions = QueryGate(threading.RLock(), clock, clock.sleep, clock)
    with questions.turn():
        clock.now += 5.0
    with pytest.raises(BusyError, match="took long; try again in 15 s"), questions.turn():
        pass
    clock.now += 15.0
    with questions.turn():
        pass
    assert questions.refused == 1


def test_a_question_that_fails_leaves_room_for_the_next() -> None:
    questions = QueryGate(threading.RLock(), time.monotonic)
    for _ in range(WAITING + 3):
        with pytest.raises(KeyError), questions.turn():
            raise KeyError
    assert questions.refused == 0


def test_only_a_few_wait_and_the_others_are_refused_at_once() -> None:
    questions = QueryGate(threading.RLock(), time.monotonic)
    inside, go, refused = threading.Event(), threading.Event(), []

    def ask() -> None:
        try:
            with questions.turn():
                inside.set()
                go.wait(PATIENCE_S)
        except BusyError:
            refused.append(1)

    first = threading.Thread(target=ask)
    first.start()
    inside.wait(5)
    others = [threading.Thread(target=ask) for _ in range(20)]
    for thread in others:
        thread.start()
    until(lambda: len(refused) >= 20 - (WAITING - 1))
    go.set()
    for thread in (first, *others):
        thread.join()


def test_askers_do_not_keep_the_lock_from_the_loop() -> None:
    lock, stopping = threading.RLock(), threading.Event()
    questions = QueryGate(lock, time.monotonic, worked=time.monotonic)

    def ask() -> None:
        while not stopping.is_set():
            try:
                with questions.turn():
                    time.sleep(0.02)
            except BusyError:
                time.sleep(0.005)

    threads = [threading.Thread(target=ask) for _ in range(20)]
    for thread in threads:
        thread.start()
    turns, end = 0, time.monotonic() + 1.0
    while time.monotonic() < end:
        with lock:
            turns += 1
        time.sleep(0.001)
    stopping.set()
    for thread in threads:
        thread.join()
    assert turns > 100, "askers hold it a quarter of the time at most"


def test_a_rank_is_looked_up_where_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvgraph.graph.ranking import order as places

    graph, none = KVCacheGraph(clock=lambda: 1.0), as_keys([])
    graph.apply("e", [BlocksStored(pack(1, 2, 3, 4, 5), None, 16)])
    ranked = graph.rank("e", 3)
    known = {"e": EvictionRanking(1, 1.0, ranked.order, none, none, none)}
    last = {"e": {"ranked_by": "classic", "rank": 4, "of": 5}}
    anew, looked_up = graph.explain(1)["ranks"], graph.explain(1, known)["ranks"]
    assert looked_up == anew == last, "it is in no ranking: all are ranked anew"
    computed = graph.explain(5)["ranks"]
    monkeypatch.setattr(places, "resident_scores", None)
    assert graph.explain(5, known)["ranks"] == computed == {"e": {**last["e"], "rank": 0}}


def test_an_answer_is_worked_out_once_while_it_is_fresh() -> None:
    clock, worked_out = Clock(0.0), []
    recent = RecentAnswers(clock)
    for _ in range(3):
        assert recent.of("now", lambda: worked_out.append(clock.now) or len(worked_out)) == 1
    clock.now += FRESH_S
    assert recent.of("now", lambda: 2) == 2
    assert recent.of("another", lambda: 3) == 3


def test_while_one_works_it_out_others_get_the_answer_before() -> None:
    clock = Clock(0.0)
    recent = RecentAnswers(clock)
    recent.of("now", lambda: "before")
    clock.now += FRESH_S
    seen = []

    def slow() -> str:
        seen.append(recent.of("now", lambda: "worked out twice"))
        clock.now += STALE_S  # it is too old for anybody by then
        seen.append(recent.of("now", lambda: "worked out by who cannot wait"))
        return "after"

    assert recent.of("now", slow) == "after"
    assert seen == ["before", "worked out by who cannot wait"]


def test_who_is_refused_gets_the_answer_before_while_that_is_young() -> None:
    clock = Clock(0.0)
    recent = RecentAnswers(clock)

    def refused() -> str:
        raise BusyError("many ask", 1)

    recent.of("now", lambda: "before")
    clock.now += FRESH_S
    assert recent.of("now", refused) == "before"
    clock.now += STALE_S
    with pytest.raises(BusyError):
        recent.of("now", refused)
