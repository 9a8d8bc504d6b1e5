"""Requests that are held beside tiers: they need no block before they start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hall import Clock, Hall, shape
from kvgraph.graph.types import as_keys
from kvgraph.graph.wire.advice import EvictionRanking
from kvgraph.hooks.keys import key_of
from paper import park, text

pytestmark = pytest.mark.usefixtures("vllm_loaded")

BLOCKS = 8


@pytest.fixture
def hall(paper: Callable[..., Any]) -> Hall:
    """An engine with tiers, whose prompt of seed 1 has copies only."""
    hall = Hall(paper(shape(warm=256), clock=Clock()))
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
def test_a_full_hall_takes_no_room_from_prefetches(hall: Hall, waiting: int) -> None:
    hall.busy()
    hall.say(0)
    names = []
    for number in range(waiting):
        hall.saturate()
        names.append(hall.ask(6, 50 + number))
    assert hall.held == names
    suggest(hall)
    for _ in range(10):
        hall.step(room=0)
        hall.engine.finish_copies()
    assert hall.held == names
    assert hall.side.bridge.ledger.counts.prefetched == BLOCKS


def test_who_is_released_wants_room(hall: Hall) -> None:
    line = hall.side.bridge.line
    hall.busy()
    hall.say(0)
    name = hall.ask(6, 50)
    assert name not in line
    hall.step(room=0)
    assert name not in line
    hall.step(room=20)
    assert hall.held == []
    assert (len(line), line.needed) == (1, 7), "its prompt's blocks and one for its answer"
    hall.step(2, room=20)
    assert name in hall.started
    assert not line


def test_who_is_held_at_its_turn_wants_none_until_then(hall: Hall) -> None:
    line = hall.side.bridge.line
    hall.crowd()
    queue = hall.holding.queue
    name = queue.head.request_id
    assert name in line
    queue.hold_head()
    assert name not in line
    queue.release(name)
    assert name in line


def test_who_goes_away_while_held_wants_nothing(hall: Hall) -> None:
    hall.busy()
    hall.say(0)
    hall.abort(hall.ask(6, 50))
    assert hall.held == []
    assert not hall.side.bridge.line
