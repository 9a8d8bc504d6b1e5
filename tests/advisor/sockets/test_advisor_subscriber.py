"""The sidecar's ROUTER over real sockets: garbage, gaps, unknown peers, silence."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import msgspec
import pytest
import zmq
from hand_clock import Clock
from kvgraph.advisor.intake import BusyMeter
from kvgraph.advisor.sockets.publisher import TIPS_S, AdvicePublisher
from kvgraph.advisor.sockets.subscriber import EventSubscriber, engine_id
from kvgraph.graph.wire import frames as wire
from kvgraph.graph.wire.advice import Refused, ResyncRequest, SendTips
from kvgraph.graph.wire.events import (
    AdviceApplied,
    AnyEvent,
    BlocksRemoved,
    BlocksResident,
    EngineHello,
    Pressure,
)
from kvgraph.hooks.link.mailbox import Mailbox
from sidecar_ends import Dealer

PRESSURE = Pressure(10, 5, 5, 1, 0)
REMOVED = BlocksRemoved(b"\1" * 8)


class Engine(Dealer):
    def has_advice(self) -> bool:
        return bool(self.socket.poll(50))


class NotReadYet:
    """A socket with messages that its first read does not find."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket

    def recv_multipart(self, flags: int) -> list[bytes]:
        raise zmq.Again

    def poll(self, milliseconds: int) -> int:
        return int(self._socket.poll(milliseconds))


class Bench:
    """A subscriber on a real ROUTER, with a clock that only tests move."""

    def __init__(self, endpoint: str, capacity: int = 8, timeout_s: float = 1.8) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.clock = Clock(100.0)
        self.endpoint = endpoint
        router = self.router = self.context.socket(zmq.ROUTER)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.bind(endpoint)
        self.publisher = AdvicePublisher(router, self.clock)
        self.subscriber = EventSubscriber(
            router, self.publisher.request_resync, self.publisher.refuse, self.clock,
            engine_timeout_s=timeout_s, capacity=capacity,
        )  # fmt: skip
        self.engines: list[Engine] = []

    def engine(self, name: str = "engine") -> Engine:
        self.engines.append(Engine(self.context, self.endpoint, name))
        return self.engines[-1]

    def greeted(self, name: str = "engine") -> Engine:
        """An engine whose hello arrived."""
        engine = self.engine(name)
        engine.greet()
        self.receive(1)
        return engine

    def hears(
        self, engine: Engine, *events: AnyEvent, seq: int
    ) -> list[tuple[str, list[AnyEvent]]]:
        """What it hands on of one batch."""
        engine.send(*events, seq=seq)
        return self.receive(1)

    def receive(self, messages: int) -> list[tuple[str, list[AnyEvent]]]:
        wanted = self.subscriber.counters["messages"] + messages
        taken: list[tuple[str, list[AnyEvent]]] = []
        deadline = time.monotonic() + 10
        while self.subscriber.counters["messages"] < wanted:
            assert time.monotonic() < deadline, "messages are missing"
            self.router.poll(100)
            taken += [(said.engine, said.events) for said in self.subscriber.receive(1000)]
        return taken

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench(f"inproc://subscriber-{os.urandom(4).hex()}")
    yield bench
    bench.close()


def test_a_hello_makes_an_engine_and_its_events_are_handed_on(bench: Bench) -> None:
    engine = bench.engine()
    engine.greet()
    engine.send(PRESSURE)
    hello = [EngineHello("engine", "model", 16, 100, "test 1"), BlocksResident(b"")]
    engine_name = engine_id(engine.identity)
    assert bench.receive(2) == [(engine_name, hello), (engine_name, [PRESSURE])]
    (peer,) = bench.subscriber.peers
    assert peer.synced
    assert not engine.has_advice()


def test_engines_of_a_model_that_hash_blocks_differently_are_named_in_one_line(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    told = [("m", "sha256 1"), ("m", "sha256 1"), ("other", "sha256 2"), ("m", "sha256 2")]
    for number, (model, hashing) in enumerate(told):
        assert "hash blocks differently" not in caplog.text
        bench.engine().send(EngineHello(f"e{number}", model, 16, 9, "v", hashing=hashing))
        bench.receive(1)
    (line,) = [each for each in caplog.messages if "hash blocks differently" in each]
    assert "'e0', 'e1': blocks of 16 tokens, sha256 1; 'e3': blocks of 16 tokens, sha256 2" in line


def test_a_stranger_is_asked_to_introduce_itself(bench: Bench) -> None:
    engine = bench.engine()
    assert bench.hears(engine, REMOVED, seq=41) == []
    assert engine.read() == ResyncRequest("unknown engine")
    engine.greet()
    engine.send(PRESSURE)
    assert len(bench.receive(2)) == 2
    assert bench.subscriber.peers[0].sequence.gaps == 0


def test_a_stranger_is_asked_at_most_twice_a_second(bench: Bench) -> None:
    engine = bench.engine()
    for seq in range(10):
        bench.hears(engine, PRESSURE, seq=seq)
    bench.clock.now += 0.6
    bench.hears(engine, PRESSURE, seq=10)
    assert [engine.read(), engine.read()] == [ResyncRequest("unknown engine")] * 2
    assert not engine.has_advice()


def test_a_gap_withholds_advice_until_the_engine_is_back_in_step(bench: Bench) -> None:
    engine = bench.greeted()
    bench.clock.now += 1
    assert bench.hears(engine, REMOVED, seq=3) == [(engine_id(engine.identity), [REMOVED])]
    (peer,) = bench.subscriber.peers
    assert not peer.synced
    assert (peer.sequence.gaps, peer.sequence.missed) == (1, 2)
    assert engine.read() == ResyncRequest("gap")
    engine.greet()
    bench.receive(1)
    assert bench.subscriber.peers[0].synced


def test_an_engine_that_ignores_the_request_is_asked_again(bench: Bench) -> None:
    engine = bench.greeted()
    for seq in (5, 6, 7):
        bench.clock.now += 0.6
        bench.hears(engine, PRESSURE, seq=seq)
    asked = [engine.read() for _ in range(3)]
    assert asked == [ResyncRequest(why) for why in ("gap", "not in step", "not in step")]


def test_repeated_and_late_batches_are_dropped(bench: Bench) -> None:
    engine = bench.greeted()
    taken = [bench.hears(engine, REMOVED, seq=seq) for seq in (1, 2, 2, 1, 0, 3)]
    assert [len(each) for each in taken] == [1, 1, 0, 0, 0, 1]
    assert bench.subscriber.counters["duplicates"] == 3
    assert bench.subscriber.peers[0].synced


def test_a_silent_engine_is_forgotten_and_must_say_hello_again(bench: Bench) -> None:
    engine, other = bench.greeted("one"), bench.greeted("two")
    bench.clock.now += 1.0
    bench.hears(other, PRESSURE, seq=1)
    bench.clock.now += 1.0
    assert bench.subscriber.expire() == []  # nobody looked since: its messages may be waiting
    assert list(bench.subscriber.receive(1)) == []
    assert bench.subscriber.expire() == [engine_id(engine.identity)]
    assert [peer.hello.engine for peer in bench.subscriber.peers] == ["two"]
    bench.clock.now += 3.0
    assert bench.subscriber.lost() == {"one": 3.0}
    assert bench.hears(engine, REMOVED, seq=1) == []
    assert engine.read() == ResyncRequest("unknown engine")
    engine.greet()
    bench.receive(1)
    assert bench.subscriber.lost() == {}


def test_nobody_is_judged_silent_while_messages_wait(bench: Bench) -> None:
    engine = bench.greeted()
    bench.clock.now += 60  # as if this process had been stopped
    for _ in range(3):
        engine.send(PRESSURE)
    assert bench.router.poll(5000)
    list(bench.subscriber.receive(1))
    assert bench.subscriber.expire() == []
    bench.receive(2)
    assert bench.subscriber.expire() == []


def test_nobody_is_judged_silent_whose_messages_are_still_on_the_wire(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that got no CPU wakes: its socket looks empty until ZeroMQ's thread runs too."""
    engine = bench.greeted()
    bench.clock.now += 60
    engine.send(PRESSURE)
    assert bench.router.poll(5000)
    with monkeypatch.context() as patch:
        patch.setattr(bench.subscriber, "_socket", NotReadYet(bench.router))
        assert list(bench.subscriber.receive(1)) == []
        assert bench.subscriber.expire() == []
    bench.receive(1)
    assert bench.subscriber.expire() == []
    assert bench.subscriber.peers[0].synced


def test_a_silent_engine_is_forgotten_though_another_is_always_heard(bench: Bench) -> None:
    quiet, lively = bench.greeted("quiet"), bench.greeted("lively")
    bench.clock.now += 60
    lost = list[str]()
    for _ in range(3):
        for _ in range(2):
            lively.send(PRESSURE)
            assert bench.router.poll(5000)
        bench.receive(1)
        bench.clock.now += 0.1
        lively.send(PRESSURE)
        assert bench.router.poll(5000)
        lost += bench.subscriber.expire()
    assert lost == [engine_id(quiet.identity)]


def test_engines_beyond_the_capacity_are_refused_and_counted() -> None:
    with closing(Bench(f"inproc://capacity-{os.urandom(4).hex()}", capacity=2)) as bench:
        for _ in range(3):
            bench.greeted()
        assert len(bench.subscriber.peers) == 2
        assert bench.subscriber.counters["engines_refused"] == 1
        refused = bench.engines[-1].read()
        assert isinstance(refused, Refused)
        assert "serves 2 engines already" in refused.reason
        assert not any(engine.has_advice() for engine in bench.engines)


GOOD = wire.encode_events(1, [PRESSURE])
GARBAGE = {
    "one empty frame": [b""],
    "one frame": [b"x"],
    "two frames": [b"a", b"b"],
    "four frames": [*GOOD, b""],
    "a hundred frames": [b"x"] * 100,
    "no sequence number": [GOOD[0], b"", GOOD[2]],
    "7 bytes of sequence number": [GOOD[0], b"\0" * 7, GOOD[2]],
    "9 bytes of sequence number": [GOOD[0], b"\0" * 9, GOOD[2]],
    "64 bytes of sequence number": [GOOD[0], b"\0" * 64, GOOD[2]],
    "sequence number 2**64 - 1": [GOOD[0], b"\xff" * 8, GOOD[2]],
    "another header": [b"HTTP", *GOOD[1:]],
    "an empty payload": [*GOOD[:2], b""],
    "a cut payload": [*GOOD[:2], GOOD[2][:-1]],
    "a list that claims 4 G": [*GOOD[:2], b"\xdd\xff\xff\xff\xff"],
    "a map that claims 4 G": [*GOOD[:2], b"\xdf\xff\xff\xff\xff"],
    "bytes that claim 4 G": [*GOOD[:2], b"\xc6\xff\xff\xff\xff"],
    "nested too deep": [*GOOD[:2], b"\x91" * 100_000],
    "text that is not UTF-8": [*GOOD[:2], b"\x91\x91\x92\x08\xa2\xff\xfe"],
    "5 MB of empty maps": [*GOOD[:2], b"\x91\xdd\x00\x4c\x4b\x40" + b"\x80" * 5_000_000],
    "a tag that is text": [*GOOD[:2], b"\x91\x91\x91\xa1x"],
}


@pytest.mark.parametrize("frames", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_is_counted_and_harms_nobody(bench: Bench, frames: list[bytes]) -> None:
    engine, vandal = bench.greeted(), bench.engine()
    vandal.socket.send_multipart(frames)
    engine.send(PRESSURE)
    assert bench.receive(2) == [(engine_id(engine.identity), [PRESSURE])]
    assert bench.subscriber.counters["refused_wire"] == 1
    assert len(bench.subscriber.peers) == 1


def test_counters_of_a_long_life_are_read(bench: Bench) -> None:
    engine, applied = bench.greeted(), AdviceApplied(1, 2**31, 2**40, 0, 0, 2**62)
    for _ in range(3):
        bench.clock.now += 0.6
        engine.send(PRESSURE, applied)
    assert [events[-1] for _, events in bench.receive(3)] == [applied] * 3
    assert bench.subscriber.counters["refused_wire"] == 0


def raw(seq: int, *events: list[Any]) -> list[bytes]:
    """A batch of events as they are on the wire."""
    return [GOOD[0], seq.to_bytes(8, "big"), msgspec.msgpack.encode([list(events)])]


def test_a_refused_report_costs_neither_its_number_nor_the_advice(bench: Bench) -> None:
    engine, out_of_range = bench.greeted(), [16, 1, -1, 0, 0, 0, 0]
    for seq in range(1, 4):
        bench.clock.now += 0.6
        engine.socket.send_multipart(raw(seq, [15, 10, 5, 5, 1, 0], out_of_range))
    assert [events for _, events in bench.receive(3)] == [[PRESSURE]] * 3
    (peer,) = bench.subscriber.peers
    assert (peer.synced, peer.sequence.gaps, peer.resyncs) == (True, 0, 0)
    assert bench.subscriber.counters["refused_wire"] == 3
    assert not engine.has_advice()


def test_a_refused_event_of_residency_is_made_good_by_a_resync(bench: Bench) -> None:
    engine = bench.greeted()
    bench.clock.now += 1
    engine.socket.send_multipart(raw(1, [2, b"\1" * 8, None, 0], [3, b"\1" * 8]))
    assert bench.receive(1) == [(engine_id(engine.identity), [REMOVED])]
    assert engine.read() == ResyncRequest("refused")
    (peer,) = bench.subscriber.peers
    assert (peer.synced, peer.sequence.gaps) == (False, 0)
    engine.greet(seq=2)
    bench.receive(1)
    assert bench.subscriber.peers[0].synced


def test_a_newer_kind_of_event_costs_itself(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    engine, newer = bench.greeted(), [3, b"\1" * 8, "a new field"]
    for seq in range(1, 4):
        engine.socket.send_multipart(raw(seq, [99, "new", {"a": 1}], newer))
    assert [events for _, events in bench.receive(3)] == [[REMOVED]] * 3
    assert bench.subscriber.peers[0].synced
    assert bench.subscriber.counters["unknown_events"] == 3
    assert caplog.text.count("of a kind that this build does not know") == 1


def test_an_engine_that_no_resync_helps_is_asked_ever_less_often(bench: Bench) -> None:
    engine = bench.greeted()
    for seq in range(2, 302):
        bench.clock.now += 0.4
        bench.hears(engine, PRESSURE, seq=seq)
    assert bench.subscriber.peers[0].resyncs < 15, "in two minutes"


def test_more_blocks_than_the_pool_has_are_refused(bench: Bench) -> None:
    engine, hello = bench.engine(), EngineHello("liar", "model", 16, 3, "test 1")
    taken = bench.hears(engine, hello, BlocksResident(b"\1" * 32), seq=0)
    assert taken == [(engine_id(engine.identity), [hello])]
    assert not bench.subscriber.peers[0].synced
    assert bench.subscriber.counters["refused_listings"] == 1


def test_a_pool_of_two_million_blocks_of_one_token_is_listed_whole(bench: Bench) -> None:
    keys, hello = b"\1" * (8 << 21), EngineHello("mla", "model", 1, 1 << 21, "test 1")
    ((_, events),) = bench.hears(bench.engine(), hello, BlocksResident(keys), seq=0)
    assert len(events[1].hashes) == len(keys)
    assert bench.subscriber.peers[0].synced


def test_no_line_is_forged_nor_an_id_told(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    engine = bench.engine()
    nasty = "v\n2026-01-01 WARNING all is well\x1b[31m\0\u202e"
    bench.hears(engine, EngineHello(nasty, nasty, 16, 100, nasty), BlocksResident(b""), seq=0)
    bench.clock.now += 10
    list(bench.subscriber.receive(1))
    bench.subscriber.expire()
    assert len(caplog.records) == 2
    for record in caplog.records:
        assert record.getMessage().isprintable(), record.getMessage()
    assert engine_id(engine.identity) not in engine.identity.hex()


def test_another_protocol_is_logged_once(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    engine = bench.engine()
    for _ in range(5):
        engine.socket.send_multipart([b"KVG\x63", *GOOD[1:]])
    bench.receive(5)
    assert bench.subscriber.counters["refused_version"] == 5
    assert caplog.text.count("protocol version 99") == 1


def test_reading_ends_in_time_however_much_has_arrived(bench: Bench) -> None:
    engine = bench.greeted()
    for _ in range(100):
        engine.send(PRESSURE)
    bench.router.poll(1000)
    taken = 0
    for _ in bench.subscriber.receive(1000, seconds=1.0):
        bench.clock.now += 0.3  # what applying them took
        taken += 1
    assert taken == 4
    assert bench.subscriber.expire() == [], "what still waits may be a sign of life"
    assert len(bench.receive(96)) == 96


def test_a_flood_of_garbage_costs_one_line(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    engine = bench.engine()
    for _ in range(200):
        engine.socket.send_multipart([b"x"])
    bench.receive(200)
    assert len(caplog.records) == 1


def test_many_strangers_are_remembered_in_bounded_memory(bench: Bench) -> None:
    for index in range(400):
        assert bench.subscriber.may_answer(index.to_bytes(16, "big"))
        assert not bench.subscriber.may_answer(index.to_bytes(16, "big")), "it just was"
    assert len(bench.subscriber.answered) <= 256


class Flood:
    """A sidecar's ears, and an engine that loses a batch before each that it sends."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.engine = bench, bench.greeted()
        self.listings = self.tips = 0

    def hear(self) -> None:
        assert self.bench.router.poll(5000)
        while self.bench.router.poll(1):
            list(self.bench.subscriber.receive(100))

    def step(self, loses: bool, seconds: float = 0.1) -> None:
        """A tick of the engine: it answers requests at once."""
        self.bench.clock.now += seconds
        self.engine.send(PRESSURE, seq=self.engine.seq + loses)
        self.hear()
        while self.engine.socket.poll(1):
            advice = self.engine.read()
            if isinstance(advice, ResyncRequest):
                self.listings += 1
                self.engine.greet()
                self.hear()
            self.tips += isinstance(advice, SendTips)


@pytest.fixture
def flood() -> Iterator[Flood]:
    with closing(Bench("inproc://flood", timeout_s=1e6)) as bench:
        yield Flood(bench)


def test_gaps_that_each_list_is_followed_by_are_asked_about_ever_less_often(flood: Flood) -> None:
    for _ in range(600):
        flood.step(loses=True)
    assert 4 <= flood.listings <= 12, "a minute of gaps; it was a list every half second"
    flood.listings = 0
    flood.step(loses=True, seconds=31.0)
    for _ in range(110):
        flood.step(loses=False)
    assert flood.listings == 1
    flood.step(loses=True)
    flood.step(loses=False)
    assert flood.listings == 2, "in step for long: what is lost by chance is asked for at once"


def test_a_list_that_took_long_is_not_asked_for_again_soon(flood: Flood) -> None:
    (peer,) = flood.bench.subscriber.peers
    peer.listing_s = 0.8
    flood.step(loses=True, seconds=11.0)
    assert flood.listings == 1
    for _ in range(70):
        flood.step(loses=True)
    assert flood.listings == 1
    for _ in range(20):
        flood.step(loses=True)
    assert flood.listings == 2


def test_an_overloaded_sidecar_asks_for_no_list_and_for_tips(flood: Flood) -> None:
    flood.bench.subscriber.is_patient = True
    for _ in range(100):
        flood.step(loses=True)
        flood.bench.publisher.ask_for_tips(flood.bench.subscriber.peers)
    assert flood.listings == 0
    assert flood.tips == 4, "every quarter of the time for which they are wanted"
    assert not flood.bench.subscriber.peers[0].synced, "its advice is withheld"
    flood.bench.subscriber.is_patient = False
    flood.step(loses=False)
    assert flood.listings == 1
    assert flood.bench.subscriber.peers[0].synced


def test_a_loop_is_overloaded_once_it_worked_for_seconds_and_until_it_rests() -> None:
    meter, now = BusyMeter(0.0), 0.0
    states = []
    for share in (1.0,) * 8 + (0.6,) * 30 + (0.1,) * 60:
        now += 1.0
        meter.worked(now - share, now)
        states.append(meter.overloaded)
    assert not states[3], "a burst"
    assert states[7], "no burst any more"
    assert states[37], "hardly eased"
    assert not states[-1]
    assert meter.overloads == 1


def test_an_engine_sends_tips_for_as_long_as_it_was_asked_to() -> None:
    now = [0.0]
    mailbox = Mailbox(2.0, 60.0, lambda: now[0])
    assert not mailbox.wants_tips()
    mailbox.put(SendTips(TIPS_S))
    now[0] = TIPS_S - 0.1
    assert mailbox.wants_tips()
    now[0] = TIPS_S + 0.1
    assert not mailbox.wants_tips()
