"""The word on room for new sessions, at the engine's end of the wire: dated, and soon forgotten."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hand_clock import Clock
from kvgraph.graph.wire import frames
from kvgraph.graph.wire.advice import AdmissionMessage, Refused
from kvgraph.graph.wire.events import AnyEvent, EngineHello
from kvgraph.hooks.link.client import AdvisorClient


class Engine:
    def hello(self) -> EngineHello:
        return EngineHello("test:1", "model", 16, 8, "test 0")

    def resident(self) -> bytes:
        return b""

    def copies(self) -> list[AnyEvent]:
        return []

    def held(self) -> list[AnyEvent]:
        return []

    def heartbeat(self, dropped: int) -> list[AnyEvent]:
        return []


@pytest.fixture
def clock() -> Clock:
    return Clock(100.0)


@pytest.fixture
def client(clock: Clock) -> AdvisorClient:
    return AdvisorClient("ipc:///nowhere", Engine(), clock=clock)


def tell(client: AdvisorClient, message: Any) -> None:
    client.take_advice(frames.encode_advice(1, message))


def test_it_is_dated_and_goes_stale(client: AdvisorClient, clock: Clock) -> None:
    assert client.admission() is None
    tell(client, AdmissionMessage(3, 0.5, 480, 38, 31))
    word = client.admission()
    assert word is not None
    assert (word.epoch, word.ts, word.room_blocks) == (3, 99.5, 480)
    assert (word.live_sessions, word.fitting_sessions) == (38, 31)
    clock.now += 1.4
    assert client.admission() is word
    clock.now += 0.2
    assert client.admission() is None


def test_it_knows_of_what_was_told_before_it_was_made(client: AdvisorClient, clock: Clock) -> None:
    tell(client, AdmissionMessage(1, 0.0, 480, 38, 31))
    word = client.admission()
    assert word is not None
    assert word.known_of == -math.inf, "nothing was told yet"
    now = clock.now
    client.mark_sent(7, until=now - 1.0)
    client.mark_sent(8, until=now - 0.2)
    tell(client, AdmissionMessage(2, 0.1, 480, 38, 31, heard=7))
    word = client.admission()
    assert word is not None
    assert word.known_of == now - 1.0, "the eighth batch was on its way"


def test_no_limit_is_a_word_too(client: AdvisorClient) -> None:
    tell(client, AdmissionMessage(1, 0.0, None, 3, 31))
    word = client.admission()
    assert word is not None
    assert word.room_blocks is None


@pytest.mark.parametrize("age", [float("nan"), float("inf"), -1.0])
def test_an_absurd_age_is_never_fresh(client: AdvisorClient, age: float) -> None:
    tell(client, AdmissionMessage(1, age, 0, 3, 31))
    assert client.admission() is None


def test_a_refusal_and_the_end_take_it_back(client: AdvisorClient) -> None:
    tell(client, AdmissionMessage(1, 0.0, 0, 3, 2))
    tell(client, Refused("it serves 64 engines already"))
    assert client.admission() is None
    tell(client, AdmissionMessage(2, 0.0, 0, 3, 2))
    client.close()
    assert client.admission() is None
