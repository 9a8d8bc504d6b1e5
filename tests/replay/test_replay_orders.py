"""What every eviction order of the lab keeps to, found by its name: a new one is tested by it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
from kvgraph.advisor.replay.arms import Settings, new_order, order_names, run_arm
from kvgraph.advisor.replay.fast import belady_hits, infinite_hits
from kvgraph.advisor.replay.simulator import (
    EvictionOrder,
    HostTier,
    Instance,
    Load,
    Outcome,
    simulate,
)
from kvgraph.advisor.replay.trace import ServiceModel, Trace
from kvgraph.graph.logs.history import History
from made_trace import chat_trace, make_trace

SMALL, LARGE = 30, 120
IN_NO_TIME, IN_TIME = None, Load(ServiceModel(prefill_tokens_per_s=200.0), max_running=4)
LOADS = (IN_NO_TIME, IN_TIME)


class Watched(EvictionOrder):
    """An order, and an engine that checks each of its answers.

    Attributes:
        asked: How often something was to go.
    """

    def __init__(self, order: EvictionOrder) -> None:
        self._order = order
        self._free: set[int] = set()
        self._used: dict[int, int] = {}
        self._capacity = 0
        self.asked = 0

    def serves(self, capacity: int) -> None:
        self._capacity = capacity
        self._order.serves(capacity)

    def freed(self, request: int, blocks: Sequence[int], now: float) -> None:
        self._free |= set(blocks)
        self._order.freed(request, blocks, now)

    def reused(self, blocks: Sequence[int]) -> None:
        assert self._free >= set(blocks)
        self._free -= set(blocks)
        self._order.reused(blocks)

    def victims(self, count: int, now: float) -> list[int]:
        free, victims = set(self._free), self._order.victims(count, now)
        self.asked += 1
        assert len(victims) == len(set(victims)) == count, "as many as are wanted, none twice"
        assert free >= set(victims), "what is in use, or gone already, is nobody's to take"
        self._free -= set(victims)
        return victims

    def started(self, request: int, hit: int, new: Sequence[int], now: float) -> None:
        self._used.update(dict.fromkeys(new, request))
        self._order.started(request, hit, new, now)

    def evicted(self, blocks: Sequence[int], now: float) -> None:
        for block in blocks:
            del self._used[block]
        assert len(self._used) <= self._capacity
        self._order.evicted(blocks, now)

    def copied(self, made: Sequence[int], gone: Sequence[int], now: float) -> None:
        self._order.copied(made, gone, now)

    def finished(self, request: int, now: float) -> None:
        self._order.finished(request, now)


@pytest.fixture(params=order_names())
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def chats() -> Trace:
    return chat_trace(150, seed=5)


def watched(name: str, trace: Trace) -> Watched:
    return Watched(new_order(name, trace, Settings()))


def replayed(name: str, trace: Trace, capacity: int, load: Load | None = IN_NO_TIME) -> Outcome:
    instance = Instance(capacity, watched(name, trace))
    outcome = simulate(trace, [instance], load=load)
    assert instance.cached <= capacity
    assert instance.running == 0
    return outcome


def pairs() -> list[Any]:
    """Each order in each pool and each order with each load; all combinations in the large run."""
    every = product(enumerate(order_names()), enumerate((SMALL, LARGE)), enumerate(LOADS))
    return [
        pytest.param(
            name, capacity, load, id=f"{name}-{capacity}-{'in time' if load else 'at once'}",
            marks=pytest.mark.large if (n + at + which) % 2 else (),
        )
        for (n, name), (at, capacity), (which, load) in every
    ]  # fmt: skip


@pytest.mark.parametrize(("name", "capacity", "load"), pairs())
def test_it_takes_only_what_is_free_and_the_pool_never_overflows(
    name: str, chats: Trace, capacity: int, load: Load | None
) -> None:
    order = watched(name, chats)
    instance = Instance(capacity, order)
    simulate(chats, [instance], load=load)
    assert order.asked > 0, "else nothing was shown"
    assert instance.cached <= capacity


def test_the_same_requests_find_the_same(name: str, chats: Trace) -> None:
    once, again = (replayed(name, chats, SMALL, IN_TIME) for _ in range(2))
    assert once.hits.tolist() == again.hits.tolist()
    assert once.waited.tolist() == again.waited.tolist()


def test_where_there_is_room_for_all_nothing_is_lost(name: str, chats: Trace) -> None:
    order = watched(name, chats)
    outcome = simulate(chats, [Instance(chats.num_blocks + 1, order)])
    assert outcome.hits.tolist() == infinite_hits(chats).tolist()
    assert order.asked == 0


@pytest.fixture(scope="module")
def most(chats: Trace) -> dict[int, int]:
    """What is found in each pool by who knows the future."""
    return {
        capacity: int(replayed("belady-pool", chats, capacity).hits.sum())
        for capacity in (SMALL, LARGE)
    }


@pytest.mark.parametrize("capacity", [SMALL, LARGE])
def test_nobody_finds_more_than_belady(
    name: str, chats: Trace, most: dict[int, int], capacity: int
) -> None:
    outcome = replayed(name, chats, capacity)
    assert outcome.refused == 0, "what is refused never comes, though a trace's future has it"
    found = outcome.hits
    assert 0 < found.sum() <= most[capacity]
    assert found.sum() <= belady_hits(chats, capacity).sum()
    assert (found <= infinite_hits(chats)).all()


def test_a_pool_of_one_block_serves_what_fits(name: str) -> None:
    trace = make_trace([[0], [0], [1, 2], [1], [0], [1], [1]])
    outcome = replayed(name, trace, 1)
    assert outcome.hits.tolist() == [0, 1, 0, 0, 0, 0, 1]
    assert outcome.refused == 1, "two blocks at once"


def test_copies_below_change_no_promise(name: str, chats: Trace) -> None:
    order = watched(name, chats)
    simulate(chats, [Instance(SMALL, order, host=HostTier(2 * SMALL, plain=False))])
    assert order.asked > 0


def test_nothing_is_asked_of_it_before_anything_came(name: str, chats: Trace) -> None:
    order = watched(name, chats)
    order.serves(SMALL)
    assert order.victims(0, 0.0) == []


def plain_names() -> list[str]:
    return [name for name in order_names() if name.startswith("lru")]


@pytest.mark.parametrize("other", plain_names())
def test_all_that_are_called_lru_are_lru(other: str, chats: Trace) -> None:
    plain = replayed("lru", chats, SMALL).hits
    assert replayed(other, chats, SMALL).hits.tolist() == plain.tolist()


def test_a_graph_without_logs_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = chat_trace()
    found = [run_arm("default", trace, SMALL, Settings()).tolist()]
    monkeypatch.setattr("kvgraph.graph.logs.history.NoHistory", History)
    found.append(run_arm("default", trace, SMALL, Settings()).tolist())
    assert found[0] == found[1]
    assert sum(found[0]) > 0
