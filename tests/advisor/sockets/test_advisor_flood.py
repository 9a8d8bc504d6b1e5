"""A flood: more than a sidecar can take in costs no storm of resyncs, which would feed it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import zmq
from kvgraph.advisor.intake import BusyMeter
from kvgraph.advisor.sockets.publisher import TIPS_S, AdvicePublisher
from kvgraph.advisor.sockets.subscriber import EventSubscriber
from kvgraph.graph.wire import frames
from kvgraph.graph.wire.advice import ResyncRequest, SendTips
from kvgraph.graph.wire.events import BlocksResident, EngineHello, Pressure
from kvgraph.hooks.link.mailbox import Mailbox

PULSE = Pressure(10, 5, 5, 1, 0)


class Flood:
    """A sidecar's ears, an engine that loses a batch before each that it sends, and a clock."""

    def __init__(self, context: zmq.Context[Any], endpoint: str) -> None:
        self.now, self._seq, self.listings, self.tips = 100.0, 0, 0, 0
        self._router, self._dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
        self._router.bind(endpoint)
        self._dealer.setsockopt(zmq.IDENTITY, os.urandom(16))
        self._dealer.connect(endpoint)
        self.publisher = AdvicePublisher(self._router, lambda: self.now)
        self.subscriber = EventSubscriber(
            self._router,
            self.publisher.request_resync,
            self.publisher.refuse,
            lambda: self.now,
            engine_timeout_s=1e6,
        )
        self._list()
        self.hear()

    def _list(self) -> None:
        self._send([EngineHello("e", "m", 16, 100, "v"), BlocksResident(b"")])

    def _send(self, events: list[Any]) -> None:
        self._dealer.send_multipart(frames.encode_events(self._seq, events))
        self._seq += 1

    def hear(self) -> None:
        assert self._router.poll(5000)
        while self._router.poll(1):
            list(self.subscriber.receive(100))

    def step(self, loses: bool, seconds: float = 0.1) -> None:
        """A tick of the engine: it answers requests at once."""
        self.now += seconds
        self._seq += loses
        self._send([PULSE])
        self.hear()
        while self._dealer.poll(1):
            advice = frames.decode_advice(self._dealer.recv_multipart())[1]
            if isinstance(advice, ResyncRequest):
                self.listings += 1
                self._list()
                self.hear()
            self.tips += isinstance(advice, SendTips)

    def close(self) -> None:
        self._router.close(0)
        self._dealer.close(0)


@pytest.fixture
def flood() -> Iterator[Flood]:
    with zmq.Context() as context:
        flood = Flood(context, "inproc://flood")
        yield flood
        flood.close()


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
    (peer,) = flood.subscriber.peers
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
    flood.subscriber.is_patient = True
    for _ in range(100):
        flood.step(loses=True)
        flood.publisher.ask_for_tips(flood.subscriber.peers)
    assert flood.listings == 0
    assert flood.tips == 4, "every quarter of the time for which they are wanted"
    assert not flood.subscriber.peers[0].synced, "its advice is withheld"
    flood.subscriber.is_patient = False
    flood.step(loses=False)
    assert flood.listings == 1
    assert flood.subscriber.peers[0].synced


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
