"""The engine's end of the wire: bounded, dated, and deaf to nonsense."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
from hand_clock import Clock
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.types import as_keys
from kvgraph.graph.wire import frames as wire
from kvgraph.graph.wire.advice import (
    AdmissionAdvice,
    EvictionRanking,
    RankingMessage,
    Refused,
    ResyncRequest,
    StillValid,
)
from kvgraph.graph.wire.endpoints import Wake
from kvgraph.graph.wire.events import (
    AdviceApplied,
    AnyEvent,
    BlocksCleared,
    BlocksRemoved,
    BlocksResident,
    EngineHello,
    Pressure,
    RequestHeld,
    RequestReleased,
)
from kvgraph.graph.wire.frames import HEADER
from kvgraph.hooks.access import why_absent
from kvgraph.hooks.fake import FakeEngine
from kvgraph.hooks.link.client import AdvisorClient, ClientOptions
from kvgraph.hooks.link.outbox import Outbox
from waiting import until
from wire_keys import pack as keys


class Engine:
    """Answers what the client asks."""

    def __init__(self) -> None:
        self.cached = keys(1, 2, 3)
        self.waiting: list[AnyEvent] = []

    def hello(self) -> EngineHello:
        return EngineHello("test:1", "model", 16, 8, "test 0")

    def resident(self) -> bytes:
        return self.cached

    def copies(self) -> list[AnyEvent]:
        return []

    def held(self) -> list[AnyEvent]:
        return list(self.waiting)

    def heartbeat(self, dropped: int) -> list[AnyEvent]:
        return [Pressure(8, 4, 4, 1, 0), AdviceApplied(0, 0, 0, 0, 0, dropped)]


def ranking(
    epoch: int = 1, age_s: float = 0.0, order: bytes = keys(5, 6), heard: int = 0
) -> RankingMessage:
    return RankingMessage(epoch, age_s, order, keys(9), b"", b"", heard)


@pytest.fixture
def engine() -> Engine:
    return Engine()


NewClient = Callable[..., AdvisorClient]


@pytest.fixture
def new_client(engine: Engine) -> Iterator[NewClient]:
    """Starts a client at an endpoint; it is closed after the test."""
    with contextlib.ExitStack() as stack:

        def start(endpoint: str, *clock: Any, **options: Any) -> AdvisorClient:
            client = AdvisorClient(
                endpoint, engine, ClientOptions(**{"tick_s": 0.01, **options}), *clock
            )
            stack.enter_context(contextlib.closing(client)).start()
            return client

        yield start


@pytest.fixture
def client(router: Any, new_client: NewClient) -> AdvisorClient:
    client = new_client(router.endpoint, heartbeat_s=0.05, absent_s=0.3, resync_gap_s=0.02)
    router.read_until(lambda: client.hellos)
    return client


@pytest.fixture
def clock() -> Clock:
    return Clock(100.0)


@pytest.fixture
def silent_client(clock: Clock) -> AdvisorClient:
    """One that nobody started: a test hands it what arrives."""
    return AdvisorClient("ipc:///nowhere", Engine(), clock=clock)


def payload(message: Any) -> list[bytes]:
    return [HEADER, bytes(8), msgspec.msgpack.encode(message)]


def of_kind(router: Any, kind: type) -> list[Any]:
    return [each for each in router.events if isinstance(each, kind)]


def test_first_batch_is_hello_and_resident_numbered_from_zero(
    router: Any, client: AdvisorClient
) -> None:
    router.read_until(lambda: router.has(Pressure))
    seq, first = router.batches[0]
    assert seq == 0
    assert isinstance(first[0], EngineHello)
    assert first[1] == BlocksResident(keys(1, 2, 3))
    assert [seq for seq, _ in router.batches] == list(range(len(router.batches)))
    assert router.peers == [client.identity]


def test_events_arrive_in_order(router: Any, client: AdvisorClient) -> None:
    for i in range(3000):
        client.emit(BlocksRemoved(keys(i)))
    router.read_until(lambda: len(of_kind(router, BlocksRemoved)) == 3000)
    assert [event.hashes for event in of_kind(router, BlocksRemoved)] == [
        keys(i) for i in range(3000)
    ]
    assert client.dropped == 0


def test_heartbeat_goes_on_without_events(router: Any, client: AdvisorClient) -> None:
    router.read_until(lambda: len(of_kind(router, Pressure)) >= 3)
    assert router.has(AdviceApplied)


def test_a_full_queue_drops_counts_and_leaves_a_hole_in_the_numbers(
    router: Any, engine: Engine
) -> None:
    options = ClientOptions(queue_limit=10, tick_s=0.01, heartbeat_s=0.05)
    with contextlib.closing(AdvisorClient(router.endpoint, engine, options)) as client:
        for i in range(25):
            client.emit(BlocksRemoved(keys(i)))
        assert client.dropped == 15
        client.start()
        router.read_until(lambda: len(of_kind(router, BlocksRemoved)) == 10)
        assert router.batches[0][0] == 1  # number 0 went with what was dropped
        router.read_until(lambda: any(getattr(e, "dropped", 0) == 15 for e in router.events))


def test_without_a_sidecar_nothing_piles_up_and_one_line_says_so(
    socket_directory: Path, new_client: NewClient, caplog: pytest.LogCaptureFixture
) -> None:
    nobody = f"ipc://{socket_directory}/nobody"
    client = new_client(nobody, queue_limit=100, absent_s=0.05, silent_s=0.1)
    for _ in range(30):
        for _ in range(50):
            client.emit(BlocksCleared())
        time.sleep(0.01)
        assert len(client.outbox) <= 100
    until(lambda: "no sidecar answers" in caplog.text)
    client.close()
    assert client.dropped > 1000
    said = [r.getMessage() for r in caplog.records if "no sidecar answers" in r.message]
    assert len(said) == 1
    assert "except for what its callers protect" in said[0], (
        "stated protection is held all the same"
    )
    assert client.ranking() is None


def test_what_can_be_seen_of_an_absence_is_said(
    socket_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = socket_directory / "taken"
    assert not why_absent(f"ipc://{taken}"), "nobody has made it"
    taken.touch()
    assert not why_absent(f"ipc://{taken}")
    monkeypatch.setattr(os, "access", lambda *_, **__: False)  # as for another user's, but for root
    hint = f"(this engine runs as uid {os.geteuid()}, which may not connect to that socket)"
    assert hint in why_absent(f"ipc://{taken}")
    assert "set AITHER_KVCACHE_SIDECAR_TOKEN" in why_absent("tcp://127.0.0.1:7")
    monkeypatch.setenv("AITHER_KVCACHE_SIDECAR_TOKEN", "x")
    assert not why_absent("tcp://127.0.0.1:7")


def test_while_nobody_is_there_the_thread_leaves_the_engine_alone(
    socket_directory: Path, new_client: NewClient, new_router: Callable[[str], Any]
) -> None:
    endpoint, looks = f"ipc://{socket_directory}/later", list[float]()

    def clock() -> float:
        if threading.current_thread().name == "kvgraph-client":
            looks.append(time.monotonic())
        return time.monotonic()

    client = new_client(endpoint, clock, absent_s=0.1, alone_tick_s=10.0, resync_gap_s=0.02)
    until(lambda: not client.outbox.is_open)
    time.sleep(0.5)  # it goes to sleep
    before = len(looks)
    for _ in range(1000):
        client.emit(BlocksCleared())
    time.sleep(0.5)
    assert len(looks) == before, "it slept, and took Python's lock from nobody"
    assert not len(client.outbox), "nothing is kept that somebody would have to free"
    late = new_router(endpoint)
    late.read_until(lambda: late.has(BlocksResident))
    assert isinstance(late.batches[0][1][0], EngineHello)
    assert time.monotonic() - looks[before - 1] < 8.0, "who connects is noticed at once"
    client.emit(BlocksRemoved(keys(7)))
    late.read_until(lambda: BlocksRemoved(keys(7)) in late.events)


def test_who_wakes_a_thread_that_has_ended_writes_to_nobody(tmp_path: Path) -> None:
    wake = Wake()
    wake.close()
    with (tmp_path / "a").open("wb", 0) as first, (tmp_path / "b").open("wb", 0) as second:
        wake.set()  # the numbers of the pipe's ends are those of the two files now
        assert first.tell() == second.tell() == 0


def test_resync_sends_hello_resident_then_what_was_queued_since(
    router: Any, client: AdvisorClient, engine: Engine
) -> None:
    router.read_until(lambda: router.has(Pressure))
    engine.cached = keys(7)
    router.advise(ResyncRequest("gap"))
    router.read_until(lambda: len(of_kind(router, EngineHello)) == 2)
    client.emit(BlocksRemoved(keys(7)))
    router.read_until(lambda: router.has(BlocksRemoved))
    kinds = [type(e) for e in router.events]
    second = len(kinds) - 1 - kinds[::-1].index(EngineHello)
    assert router.events[second + 1] == BlocksResident(keys(7))
    assert kinds.index(BlocksRemoved) > second + 1


def test_who_is_held_is_told_after_each_hello_and_before_what_was_queued_since(
    router: Any, client: AdvisorClient, engine: Engine
) -> None:
    router.read_until(lambda: router.has(Pressure))
    engine.waiting = [RequestHeld(f"chatcmpl-{number}", 3) for number in range(2_500)]
    told = len(router.events)
    router.advise(ResyncRequest("gap"))
    router.read_until(lambda: len(of_kind(router, EngineHello)) == 2)
    client.emit(RequestReleased("chatcmpl-7", 1.0, "gone"))
    router.read_until(lambda: router.has(RequestReleased))
    graph = KVCacheGraph()
    graph.apply("e", [EngineHello("e", "m", 16, 8, "v"), RequestHeld("an-end-that-was-lost", 3)])
    graph.apply("e", router.events[told:])
    assert list(graph.waiting()) == [
        each.request_id for each in engine.waiting if each.request_id != "chatcmpl-7"
    ]


def test_a_ranking_is_dated_and_goes_stale(silent_client: AdvisorClient, clock: Clock) -> None:
    client = silent_client
    assert client.ranking() is None
    client.take_advice(payload(ranking(epoch=4, age_s=0.5)))
    held = client.ranking()
    assert isinstance(held, EvictionRanking)
    assert (held.epoch, held.ts, held.order.tolist()) == (4, 99.5, [5, 6])
    clock.now += 1.4
    assert client.ranking() is held
    clock.now += 0.2
    assert client.ranking() is None
    client.mark_sent(3, until=clock.now - 1)
    client.take_advice(payload(StillValid(4, 0.0, heard=3)))
    dated = client.ranking()
    assert dated.order is held.order
    assert (held.known_of, dated.known_of) == (-math.inf, clock.now - 1)
    client.take_advice(payload(StillValid(4, 0.0, heard=2)))
    dated = client.ranking()
    assert dated.known_of == clock.now - 1, "what a ranking knew it knows for good"
    clock.now += 3
    client.take_advice(payload(StillValid(3, 0.0)))
    assert client.ranking() is None, "another epoch's word must not revive it"


def test_ticks_in_which_nothing_was_told_push_out_nothing(
    silent_client: AdvisorClient, clock: Clock
) -> None:
    for batches in (3, *[4] * 2000):
        silent_client.mark_sent(batches, until=clock.now)
        clock.now += 0.001
    silent_client.take_advice(payload(ranking(heard=3)))
    assert silent_client.ranking().known_of == 100.0


def socket_to(sent: list[wire.EventMessage], room: int = 99) -> Any:
    """A socket that takes so many messages."""
    return SimpleNamespace(
        poll=lambda *_: len(sent) < room,
        send_multipart=lambda frames, _: sent.append(wire.decode_events(frames)),
    )


def test_what_finds_no_room_waits_in_its_place() -> None:
    sent: list[wire.EventMessage] = []
    outbox = Outbox(limit=100, batch_limit=2)
    removed = [BlocksRemoved(keys(number)) for number in range(3)]
    outbox.emit(SimpleNamespace(events=lambda: removed))  # type: ignore[arg-type]
    outbox.emit(BlocksCleared())
    assert not outbox.drain(socket_to(sent, room=1))
    assert [message.events for message in sent] == [removed[:2]]
    assert (list(outbox), outbox.dropped) == ([removed[2], BlocksCleared()], 0)


def test_what_cannot_be_made_leaves_a_hole_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> list[AnyEvent]:
        raise RuntimeError("a secret text")

    sent: list[wire.EventMessage] = []
    outbox = Outbox(limit=100, batch_limit=10)
    for _ in range(2):
        outbox.emit(SimpleNamespace(events=fail))  # type: ignore[arg-type]
        outbox.emit(BlocksCleared())
    assert outbox.drain(socket_to(sent))
    assert [message.events for message in sent] == [[BlocksCleared(), BlocksCleared()]]
    assert sent[0].seq == 1, "a number was skipped: the sidecar asks for what it missed"
    assert outbox.dropped == 2
    assert len(caplog.records) == 1
    assert "secret" not in caplog.text


@pytest.mark.parametrize("age", [float("nan"), float("inf"), -1.0])
def test_an_absurd_age_is_never_fresh(silent_client: AdvisorClient, age: float) -> None:
    room = [6, 1, age, 0, 3, 31]
    for message in (ranking(age_s=age), room):
        silent_client.take_advice(payload(message))
    assert silent_client.ranking() is None
    assert silent_client.admission() is None


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"x", b"y"],
        [HEADER, bytes(8), b""],
        [HEADER, bytes(7), b"\x90"],
        [HEADER, bytes(8), b"\xff" * 40],
        [HEADER, b"\xff" * 8, b"\x90"],
        [HEADER, bytes(8), b"\x91" * 5000],
        [HEADER, bytes(8), msgspec.msgpack.encode(ranking(order=b"12345"))],
        [b"HTTP", bytes(8), b"\x90"],
        [HEADER] * 100,
    ],
)
def test_garbage_is_counted_and_ignored(silent_client: AdvisorClient, frames: list[bytes]) -> None:
    silent_client.take_advice(frames)
    assert silent_client.garbage == 1
    assert silent_client.ranking() is None


def test_a_sidecar_that_refuses_us_is_left_alone_for_a_while(
    router: Any, new_client: NewClient, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    looks = list[float]()

    def looked_at() -> float:
        if threading.current_thread().name == "kvgraph-client":
            looks.append(clock.now)
        return clock.now

    def let_it_look(times: int) -> None:
        wanted = len(looks) + times
        router.read_until(lambda: len(looks) >= wanted)

    options = {"alone_tick_s": 0.01, "silent_s": 0.1, "refused_s": 0.5}
    client = new_client(router.endpoint, looked_at, **options)
    router.read_until(lambda: router.has(BlocksResident))
    client.emit(BlocksRemoved(keys(1)))
    router.read_until(lambda: router.has(BlocksRemoved))
    router.advise(Refused("it serves 64 engines already"))
    router.read_until(lambda: not client.outbox.is_open)
    for _ in range(8):
        clock.now += 0.06
        client.emit(BlocksRemoved(keys(2)))
        let_it_look(10)
    assert client.ranking() is None
    assert client.dropped == 8
    clock.now += 0.06
    router.read_until(lambda: len(of_kind(router, EngineHello)) == 2)
    told = [type(event) for event in router.events]
    before = told[: len(told) - 1 - told[::-1].index(EngineHello)]
    assert (before.count(EngineHello), before.count(BlocksRemoved)) == (1, 1)
    assert before.count(Pressure) <= 1, "no heartbeat either"
    (line,) = caplog.messages
    assert "refuses this engine: it serves 64 engines already" in line


def test_who_is_refused_again_and_again_is_never_said_to_be_linked(
    silent_client: AdvisorClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            silent_client.take_advice(payload(Refused("it is full")))
        assert "linked" not in caplog.text
        silent_client.take_advice(payload(ranking()))
    assert "engine linked to the sidecar" in caplog.text
    assert caplog.text.count("refuses this engine: it is full") == 1


def test_garbage_and_a_foreign_version_each_leave_one_line_and_the_link_lives(
    router: Any, client: AdvisorClient, caplog: pytest.LogCaptureFixture
) -> None:
    router.read_until(lambda: router.peers)
    for _ in range(5):
        router.send_frames([b"nonsense", b"\xff" * 100])
        router.send_frames([b"KVG\x63", bytes(8), b"\x90"])
    router.advise(ranking(epoch=7).at(0.0))
    router.read_until(lambda: client.ranking() is not None)
    assert client.garbage == 5
    assert client.refused_version == 5
    assert sum("not advice" in r.message for r in caplog.records) == 1
    assert sum("protocol version 99" in r.getMessage() for r in caplog.records) == 1


def test_an_engine_that_fails_to_answer_ends_the_link_not_the_engine(
    router: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Engine):
        def resident(self) -> bytes:
            raise RuntimeError("pool is gone")

    client = AdvisorClient(router.endpoint, Broken(), ClientOptions(tick_s=0.01))
    client.start()
    assert client.wait(5), "the thread ends"
    client.emit(BlocksCleared())
    assert client.ranking() is None
    assert sum("without advice" in r.message for r in caplog.records) == 1
    client.close()


def test_an_endpoint_that_is_none_is_said_once(
    new_client: NewClient, caplog: pytest.LogCaptureFixture
) -> None:
    assert new_client("carrier-pigeon://nest").wait(5), "the thread ends"
    assert len(caplog.records) == 1


def test_a_peer_of_another_protocol_is_nobody(new_client: NewClient) -> None:
    with zmq.Context() as context, context.socket(zmq.STREAM) as other:
        other.setsockopt(zmq.LINGER, 0)
        port = other.bind_to_random_port("tcp://127.0.0.1")
        client = new_client(f"tcp://127.0.0.1:{port}", absent_s=0.1, queue_limit=10)
        other.recv_multipart()
        other.send_multipart([other.recv_multipart()[0], b"HTTP/1.1 400 Bad Request\r\n\r\n"])
        for _ in range(20):
            client.emit(BlocksCleared())
            time.sleep(0.02)
        client.close()
        assert client.standing.linked is False
        assert client.ranking() is None


def test_closing_forgets_the_ranking(router: Any, client: AdvisorClient) -> None:
    router.read_until(lambda: router.peers)
    router.advise(ranking().at(0.0))
    router.read_until(lambda: client.ranking() is not None)
    client.close()
    assert client.ranking() is None
    assert client.wait(0), "the thread has ended"


def test_only_a_sidecar_that_answers_is_nudged(
    router: Any, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever writes to the pipe hands Python's lock to the client's thread, and waits for it."""
    woken: list[Wake] = []
    monkeypatch.setattr(Wake, "set", lambda wake: woken.append(wake))
    client = AdvisorClient(router.endpoint, engine)
    client.nudge()
    assert not woken
    client.take_advice(payload(ranking()))
    client.nudge()
    assert len(woken) == 1
    client.close()


def tell(silent_client: AdvisorClient, message: Any) -> None:
    silent_client.take_advice(wire.encode_advice(1, message, now=100.0))


@pytest.mark.parametrize("room", [480, None])
def test_it_is_dated_and_goes_stale(
    silent_client: AdvisorClient, clock: Clock, room: int | None
) -> None:
    """No limit is a word, too."""
    assert silent_client.admission() is None
    tell(silent_client, AdmissionAdvice(3, 99.5, room, 38, 31))
    word = silent_client.admission()
    assert (word.epoch, word.ts, word.room_blocks) == (3, 99.5, room)
    assert (word.live_sessions, word.fitting_sessions) == (38, 31)
    clock.now += 1.4
    assert silent_client.admission() is word
    clock.now += 0.2
    assert silent_client.admission() is None


def test_it_knows_of_what_was_told_before_it_was_made(
    silent_client: AdvisorClient, clock: Clock
) -> None:
    tell(silent_client, AdmissionAdvice(1, 100.0, 480, 38, 31))
    word = silent_client.admission()
    assert word.known_of == -math.inf, "nothing was told yet"
    now = clock.now
    silent_client.mark_sent(7, until=now - 1.0)
    silent_client.mark_sent(8, until=now - 0.2)
    tell(silent_client, AdmissionAdvice(2, 99.9, 480, 38, 31, heard=7))
    word = silent_client.admission()
    assert word.known_of == now - 1.0, "the eighth batch was on its way"


def test_a_refusal_and_the_end_take_it_back(silent_client: AdvisorClient) -> None:
    tell(silent_client, AdmissionAdvice(1, 100.0, 0, 3, 2))
    tell(silent_client, Refused("it serves 64 engines already"))
    assert silent_client.admission() is None
    tell(silent_client, AdmissionAdvice(2, 100.0, 0, 3, 2))
    silent_client.close()
    assert silent_client.admission() is None


OPTIONS = ClientOptions(tick_s=0.01, heartbeat_s=0.05)


def prompt(blocks: int, salt: int = 0) -> list[int]:
    return [salt, *range(blocks * 16 - 1)]


def test_prefixes_hit_and_the_oldest_goes_first() -> None:
    engine = FakeEngine("ipc:///nowhere", num_blocks=8)
    assert engine.run(prompt(4, 1)) == 0
    assert engine.run(prompt(4, 1) + [7] * 16) == 64
    engine.run(prompt(4, 2))
    tail_of_first = engine.keys(prompt(4, 1) + [7] * 16)[-1]
    assert engine.evicted == [tail_of_first]
    assert len(engine.cached) == 8


def test_a_prompt_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="do not fit into a pool of 2"):
        FakeEngine("ipc:///nowhere", num_blocks=2).run(prompt(3))


def told(router: Any, engine: FakeEngine, **keys: Any) -> None:
    """A sidecar ranks the engine's blocks."""
    router.read_until(lambda: router.peers)
    router.advise(replace(EvictionRanking.empty(0.0), epoch=1, **keys))
    router.read_until(lambda: engine.client.ranking() is not None)


def test_it_evicts_by_the_ranking(router: Any) -> None:
    with FakeEngine(router.endpoint, num_blocks=6, options=OPTIONS) as engine:
        engine.run(prompt(3, 1))
        engine.run(prompt(3, 2))
        newest = engine.keys(prompt(3, 2))[::-1]
        told(router, engine, order=as_keys(newest))
        engine.run(prompt(3, 3))
    assert engine.evicted == newest


def test_what_is_protected_goes_last(router: Any) -> None:
    with FakeEngine(router.endpoint, num_blocks=6, options=OPTIONS) as engine:
        kept, other = (engine.keys(prompt(3, salt)) for salt in (1, 2))
        engine.run(prompt(3, 1))
        engine.run(prompt(3, 2))
        told(router, engine, protected=as_keys(kept[::-1]))
        engine.run(prompt(4, 3))
    assert engine.evicted == [*other[::-1], kept[-1]]
