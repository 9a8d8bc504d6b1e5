"""Advice on its way out: whole when new, a few bytes when not, and never waited for."""

from __future__ import annotations

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
    ContentKey,
    EvictionRanking,
    PrefetchMessage,
    ResyncRequest,
    StillValid,
)
from kvgraph.graph.wire.events import EngineHello
from sidecar_ends import Dealer
from waiting import until
from wire_keys import pack


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
        self.dealers: list[Dealer] = []

    def engine(self) -> tuple[Peer, Dealer]:
        dealer = Dealer(self.context, self.endpoint, queue=8)
        self.dealers.append(dealer)
        dealer.socket.send(b"here")
        assert self.router.recv_multipart() == [dealer.identity, b"here"]
        hello = EngineHello("engine", "model", 16, 100, "test 1")
        return Peer(dealer.identity, hello, 0.0, SequenceTracker(), synced=True), dealer

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

    def rank(self, peer: Peer, epoch: int, *keys: int, after_s: float = 0.5) -> None:
        """Publish a ranking that is as old as now, and was made so long after the one before."""
        self.clock.now += after_s
        self.publish([peer], {peer.engine: self.ranking(epoch, *keys)})

    def order(self, peer: Peer, *keys: int, after_s: float = 0.5) -> None:
        """Publish what to bring back."""
        self.clock.now += after_s
        wanted = PrefetchOrder(self.clock.now, np.array(keys, dtype=np.uint64))
        self.publish([peer], {}, {peer.engine: wanted})

    def ranking(self, epoch: int, *keys: int) -> EvictionRanking:
        nothing = np.empty(0, dtype=np.uint64)
        order = np.array(keys, dtype=np.uint64)
        return EvictionRanking(epoch, self.clock.now, order, nothing, nothing, nothing)

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(f"ipc://{tmp_path}/s")
    yield bench
    bench.close()


def is_silent(engine: Dealer) -> bool:
    return not engine.socket.poll(20)


def newest(engine: Dealer) -> int:
    """The epoch of the ranking that it reads."""
    ranking = engine.read()
    assert isinstance(ranking, EvictionRanking)
    return ranking.epoch


def test_a_ranking_is_sent_whole_once_and_then_dated_again(bench: Bench) -> None:
    peer, engine = bench.engine()
    first = bench.ranking(7, 3, 1, 2)
    bench.clock.now += 0.25
    bench.publish([peer], {peer.engine: first})
    sent = engine.read(now=100.0)
    assert isinstance(sent, EvictionRanking)
    assert sent.order.tolist() == [3, 1, 2]
    assert sent.ts == 99.75
    bench.publish([peer], {peer.engine: first})
    assert is_silent(engine), "nothing new, nothing sent"
    bench.rank(peer, 7, 3, 1, 2)
    assert engine.read() == StillValid(7, 0.0)
    bench.rank(peer, 8, 1, after_s=0.0)
    assert is_silent(engine), "of the same moment: already said"
    bench.rank(peer, 8, 1)
    assert newest(engine) == 8


def test_after_a_resync_the_ranking_is_sent_whole_again(bench: Bench) -> None:
    peer, engine = bench.engine()
    bench.rank(peer, 7, 1)
    assert newest(engine) == 7
    peer.synced = False
    bench.rank(peer, 7, 1)
    assert is_silent(engine), "no advice while we do not know its blocks"
    peer.synced = True
    bench.rank(peer, 7, 1)
    assert newest(engine) == 7


def test_each_engine_gets_the_sidecars_key_once(bench: Bench) -> None:
    (one, first), (two, second) = bench.engine(), bench.engine()
    two.synced = False
    bench.publisher.give_key([one, two])
    key = first.read()
    assert isinstance(key, ContentKey)
    assert len(key.key) == 32
    two.synced = True
    bench.publisher.give_key([one, two])
    assert second.read() == key
    assert is_silent(first)


def test_a_prefetch_is_said_each_round_until_it_is_over(bench: Bench) -> None:
    peer, engine = bench.engine()
    bench.order(peer)
    assert is_silent(engine), "there was never anything to bring back"
    for _ in range(2):  # an engine that had no room for it tries again
        bench.order(peer, 5, 6)
        assert engine.read() == PrefetchMessage(pack(5, 6))
    bench.order(peer, 5, 6, after_s=0.0)
    assert is_silent(engine), "of the same round: already said"
    bench.order(peer)
    assert engine.read() == PrefetchMessage(b"")
    bench.order(peer)
    assert is_silent(engine), "once"


def test_an_engine_whose_blocks_we_do_not_know_is_told_nothing(bench: Bench) -> None:
    peer, engine = bench.engine()
    peer.synced = False
    room = AdmissionAdvice(1, 10.0, 0, 2, 1)
    bench.publish([peer], {}, admissions={peer.engine: room})
    bench.order(peer, 5)
    assert is_silent(engine)


def test_each_message_to_an_engine_has_the_next_number(bench: Bench) -> None:
    peer, engine = bench.engine()
    numbers = []
    for epoch in range(3):
        bench.rank(peer, epoch, 1)
        numbers.append(frames.decode_advice(engine.socket.recv_multipart(), now=0.0)[0])
    assert numbers == [0, 1, 2]


def flood(bench: Bench, peers: list[Peer], after_each: Callable[[], None]) -> None:
    for epoch in range(50):
        bench.clock.now += 0.5
        rankings = {peer.engine: bench.ranking(epoch, *range(8192)) for peer in peers}
        bench.publish(peers, rankings)
        after_each()


def test_an_engine_that_does_not_read_is_dropped_and_the_other_is_not(bench: Bench) -> None:
    (deaf, engine), (lively, other) = bench.engine(), bench.engine()
    heard: list[int] = []
    flood(bench, [deaf, lively], lambda: heard.append(newest(other)))
    assert heard == list(range(50))
    assert bench.publisher.counters["dropped_full"] > 0
    while not is_silent(engine):
        engine.read()
    bench.rank(deaf, 50, 50)
    assert newest(engine) == 50, "once it reads again it gets the newest, whole"


def test_what_an_engine_could_not_take_is_sent_again_though_nothing_is_new(bench: Bench) -> None:
    deaf, engine = bench.engine()
    flood(bench, [deaf], lambda: None)
    assert bench.publisher.counters["dropped_full"] > 0
    bench.clock.now += 0.5
    rankings, wanted, admissions = {deaf.engine: bench.ranking(50, 1)}, {}, {}
    bench.publisher.publish([deaf], rankings, wanted, admissions)
    sent = bench.publisher.counters["rankings"]
    while not is_silent(engine):
        engine.read()
    for _ in range(2):
        bench.publisher.publish([deaf], rankings, wanted, admissions)
        assert bench.publisher.counters["rankings"] == sent + 1, "and once it is there, no more"
    assert newest(engine) == 50


def test_an_engine_that_is_in_step_again_is_told_at_once(bench: Bench) -> None:
    peer, engine = bench.engine()
    rankings, wanted, admissions = {peer.engine: bench.ranking(1, 1)}, {}, {}
    for peer.synced in (True, True, False, True):
        bench.publisher.publish([peer], rankings, wanted, admissions)
    bench.clock.now += 0.5
    assert bench.publisher.counters["rankings"] == 1, "the ranking is not newer"
    rankings = {peer.engine: bench.ranking(1, 1)}
    bench.publisher.publish([peer], rankings, wanted, admissions)
    assert bench.publisher.counters["rankings"] == 2, "whole again after the resync"
    assert newest(engine) == 1


def test_an_engine_that_is_gone_is_counted(bench: Bench) -> None:
    gone, engine = bench.engine()
    engine.close()
    until(lambda: bench.rank(gone, 1, 1) or bench.publisher.counters["dropped_unreachable"])
    bench.publisher.request_resync(gone.identity, "gap")  # nor does this raise


def test_a_stranger_can_be_asked_to_introduce_itself(bench: Bench) -> None:
    peer, engine = bench.engine()
    bench.publisher.request_resync(peer.identity, "unknown engine")
    assert engine.read() == ResyncRequest("unknown engine")


def test_room_is_said_each_time_anew_with_its_age(bench: Bench) -> None:
    peer, engine = bench.engine()
    word = AdmissionAdvice(3, bench.clock.now, 480, 38, 31)
    bench.clock.now += 0.25
    bench.publish([peer], {}, admissions={peer.engine: word})
    assert engine.read(now=100.0) == AdmissionAdvice(3, 99.75, 480, 38, 31)
    bench.publish([peer], {}, admissions={peer.engine: word})
    assert is_silent(engine), "of the same moment: already said"
    again = AdmissionAdvice(4, bench.clock.now, None, 30, 31)
    bench.publish([peer], {}, admissions={peer.engine: again})
    assert engine.read(now=100.0) == AdmissionAdvice(4, 100.0, None, 30, 31)
    assert bench.publisher.counters["admissions"] == 2
