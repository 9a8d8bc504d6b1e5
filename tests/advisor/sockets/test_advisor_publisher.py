"""Advice on its way out: whole when new, a few bytes when not, and never waited for."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from hand_clock import Clock
from kvgraph.advisor.planner import PrefetchOrder
from kvgraph.advisor.sockets.publisher import AdvicePublisher
from kvgraph.advisor.sockets.subscriber import Peer, SequenceTracker
from kvgraph.graph.wire import frames
from kvgraph.graph.wire.advice import (
    AdmissionAdvice,
    AnyAdvice,
    ContentKey,
    EvictionRanking,
    PrefetchMessage,
    ResyncRequest,
    StillValid,
)
from kvgraph.graph.wire.events import EngineHello


class Bench:
    """A publisher on a real ROUTER, and engines that say one word to be reachable."""

    def __init__(self, endpoint: str) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.clock = Clock(10.0)
        self.endpoint = endpoint
        self.router = self.context.socket(zmq.ROUTER)
        self.router.setsockopt(zmq.SNDHWM, 8)
        self.router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.router.bind(self.endpoint)
        self.publisher = AdvicePublisher(self.router, self.clock)
        self.sockets: list[zmq.Socket[bytes]] = []

    def engine(self) -> tuple[Peer, zmq.Socket[bytes]]:
        identity = os.urandom(16)
        socket = self.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, identity)
        socket.setsockopt(zmq.RCVHWM, 8)
        socket.connect(self.endpoint)
        socket.send(b"here")
        assert self.router.recv_multipart() == [identity, b"here"]
        self.sockets.append(socket)
        hello = EngineHello("engine", "model", 16, 100, "test 1")
        return Peer(identity, hello, 0.0, SequenceTracker(), synced=True), socket

    def publish(
        self,
        peers: list[Peer],
        rankings: dict[str, EvictionRanking],
        wanted: dict[str, PrefetchOrder] | None = None,
        admissions: dict[str, AdmissionAdvice] | None = None,
    ) -> None:
        """As the service does: what the socket has to tell is read before anything is sent."""
        while self.router.poll(0):
            self.router.recv_multipart()
        self.publisher.publish(peers, rankings, wanted or {}, admissions or {})

    def ranking(self, epoch: int, *keys: int) -> EvictionRanking:
        nothing = np.empty(0, dtype=np.uint64)
        order = np.array(keys, dtype=np.uint64)
        return EvictionRanking(epoch, self.clock.now, order, nothing, nothing, nothing)

    def order(self, *keys: int) -> PrefetchOrder:
        return PrefetchOrder(self.clock.now, np.array(keys, dtype=np.uint64))

    def close(self) -> None:
        for socket in (self.router, *self.sockets):
            socket.close(linger=0)
        self.context.term()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(f"ipc://{tmp_path}/s")
    yield bench
    bench.close()


def read(socket: zmq.Socket[bytes]) -> AnyAdvice:
    assert socket.poll(5000)
    return frames.decode_advice(socket.recv_multipart(), now=100.0)[1]


def test_a_ranking_is_sent_whole_once_and_then_dated_again(bench: Bench) -> None:
    peer, socket = bench.engine()
    first = bench.ranking(7, 3, 1, 2)
    bench.clock.now += 0.25
    bench.publish([peer], {peer.engine: first})
    sent = read(socket)
    assert isinstance(sent, EvictionRanking)
    assert sent.order.tolist() == [3, 1, 2]
    assert sent.ts == 99.75
    bench.publish([peer], {peer.engine: first})
    assert not socket.poll(20), "nothing new, nothing sent"
    bench.clock.now += 0.5
    bench.publish([peer], {peer.engine: bench.ranking(7, 3, 1, 2)})
    assert read(socket) == StillValid(7, 0.0)
    bench.publish([peer], {peer.engine: bench.ranking(8, 1)})
    assert not socket.poll(20), "of the same moment: already said"
    bench.clock.now += 0.5
    bench.publish([peer], {peer.engine: bench.ranking(8, 1)})
    assert isinstance(read(socket), EvictionRanking)


def test_after_a_resync_the_ranking_is_sent_whole_again(bench: Bench) -> None:
    peer, socket = bench.engine()
    bench.publish([peer], {peer.engine: bench.ranking(7, 1)})
    read(socket)
    peer.synced = False
    bench.clock.now += 0.5
    bench.publish([peer], {peer.engine: bench.ranking(7, 1)})
    assert not socket.poll(20), "no advice while we do not know its blocks"
    peer.synced = True
    bench.clock.now += 0.5
    bench.publish([peer], {peer.engine: bench.ranking(7, 1)})
    assert isinstance(read(socket), EvictionRanking)


def test_each_engine_gets_the_sidecars_key_once(bench: Bench) -> None:
    (one, first), (two, second) = bench.engine(), bench.engine()
    two.synced = False
    bench.publisher.give_key([one, two])
    key = read(first)
    assert isinstance(key, ContentKey)
    assert len(key.key) == 32
    two.synced = True
    bench.publisher.give_key([one, two])
    assert read(second) == key
    assert not first.poll(20)


def test_a_prefetch_is_said_each_round_until_it_is_over(bench: Bench) -> None:
    peer, socket = bench.engine()
    bench.publish([peer], {}, {peer.engine: bench.order()})
    assert not socket.poll(20), "there was never anything to bring back"
    for _ in range(2):  # an engine that had no room for it tries again
        bench.clock.now += 0.5
        bench.publish([peer], {}, {peer.engine: bench.order(5, 6)})
        assert read(socket) == PrefetchMessage(np.array([5, 6], "<u8").tobytes())
    bench.publish([peer], {}, {peer.engine: bench.order(5, 6)})
    assert not socket.poll(20), "of the same round: already said"
    bench.clock.now += 0.5
    bench.publish([peer], {}, {peer.engine: bench.order()})
    assert read(socket) == PrefetchMessage(b"")
    bench.clock.now += 0.5
    bench.publish([peer], {}, {peer.engine: bench.order()})
    assert not socket.poll(20), "once"


def test_an_engine_whose_blocks_we_do_not_know_is_told_nothing(bench: Bench) -> None:
    peer, socket = bench.engine()
    peer.synced = False
    room = AdmissionAdvice(1, 10.0, 0, 2, 1)
    bench.publish([peer], {}, {peer.engine: bench.order(5)}, {peer.engine: room})
    assert not socket.poll(20)


def test_each_message_to_an_engine_has_the_next_number(bench: Bench) -> None:
    peer, socket = bench.engine()
    numbers = []
    for epoch in range(3):
        bench.clock.now += 0.5
        bench.publish([peer], {peer.engine: bench.ranking(epoch, 1)})
        assert socket.poll(5000)
        numbers.append(frames.decode_advice(socket.recv_multipart(), now=0.0)[0])
    assert numbers == [0, 1, 2]


def flood(bench: Bench, peers: list[Peer], after_each: Callable[[], None]) -> None:
    for epoch in range(50):
        bench.clock.now += 0.5
        rankings = {peer.engine: bench.ranking(epoch, *range(8192)) for peer in peers}
        bench.publish(peers, rankings)
        after_each()


def test_an_engine_that_does_not_read_is_dropped_and_the_other_is_not(bench: Bench) -> None:
    deaf, deaf_socket = bench.engine()
    lively, socket = bench.engine()
    heard: list[AnyAdvice] = []
    flood(bench, [deaf, lively], lambda: heard.append(read(socket)))
    assert [each.epoch for each in heard if isinstance(each, EvictionRanking)] == list(range(50))
    assert bench.publisher.counters["dropped_full"] > 0
    while deaf_socket.poll(20):
        deaf_socket.recv_multipart()
    bench.clock.now += 0.5
    bench.publish([deaf], {deaf.engine: bench.ranking(50, 50)})
    latest = read(deaf_socket)
    assert isinstance(latest, EvictionRanking)
    assert latest.epoch == 50, "once it reads again it gets the newest, whole"


def test_what_an_engine_could_not_take_is_sent_again_though_nothing_is_new(bench: Bench) -> None:
    deaf, socket = bench.engine()
    flood(bench, [deaf], lambda: None)
    assert bench.publisher.counters["dropped_full"] > 0
    bench.clock.now += 0.5
    rankings, wanted, admissions = {deaf.engine: bench.ranking(50, 1)}, {}, {}
    bench.publisher.publish([deaf], rankings, wanted, admissions)
    sent = bench.publisher.counters["rankings"]
    while socket.poll(20):
        socket.recv_multipart()
    for _ in range(2):
        bench.publisher.publish([deaf], rankings, wanted, admissions)
        assert bench.publisher.counters["rankings"] == sent + 1, "and once it is there, no more"
    latest = read(socket)
    assert isinstance(latest, EvictionRanking)
    assert latest.epoch == 50


def test_an_engine_that_is_in_step_again_is_told_at_once(bench: Bench) -> None:
    peer, socket = bench.engine()
    rankings, wanted, admissions = {peer.engine: bench.ranking(1, 1)}, {}, {}
    for peer.synced in (True, True, False, True):
        bench.publisher.publish([peer], rankings, wanted, admissions)
    bench.clock.now += 0.5
    assert bench.publisher.counters["rankings"] == 1, "the ranking is not newer"
    rankings = {peer.engine: bench.ranking(1, 1)}
    bench.publisher.publish([peer], rankings, wanted, admissions)
    assert bench.publisher.counters["rankings"] == 2, "whole again after the resync"
    assert isinstance(read(socket), EvictionRanking)


def test_an_engine_that_is_gone_is_counted(bench: Bench) -> None:
    gone, socket = bench.engine()
    socket.close(linger=0)
    deadline = time.monotonic() + 10
    while not bench.publisher.counters["dropped_unreachable"]:
        assert time.monotonic() < deadline
        bench.clock.now += 0.5
        bench.publish([gone], {gone.engine: bench.ranking(1, 1)})
    bench.publisher.request_resync(gone.identity, "gap")  # nor does this raise


def test_a_stranger_can_be_asked_to_introduce_itself(bench: Bench) -> None:
    peer, socket = bench.engine()
    bench.publisher.request_resync(peer.identity, "unknown engine")
    assert read(socket) == ResyncRequest("unknown engine")


def test_room_is_said_each_time_anew_with_its_age(bench: Bench) -> None:
    peer, socket = bench.engine()
    word = AdmissionAdvice(3, bench.clock.now, 480, 38, 31)
    bench.clock.now += 0.25
    bench.publish([peer], {}, admissions={peer.engine: word})
    assert read(socket) == AdmissionAdvice(3, 99.75, 480, 38, 31)
    bench.publish([peer], {}, admissions={peer.engine: word})
    assert not socket.poll(20), "of the same moment: already said"
    again = AdmissionAdvice(4, bench.clock.now, None, 30, 31)
    bench.publish([peer], {}, admissions={peer.engine: again})
    assert read(socket) == AdmissionAdvice(4, 100.0, None, 30, 31)
    assert bench.publisher.counters["admissions"] == 2
