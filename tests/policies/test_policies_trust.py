"""What engines of one model learn from each other: where a policy may begin, and where not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvgraph.advisor.policies.evidence import Trust
from kvgraph.advisor.policies.guard import Guard
from kvgraph.advisor.replay.graph_order import GraphOrder, SimulatedSidecar
from kvgraph.advisor.replay.simulator import (
    EvictionOrder,
    Instance,
    LruOrder,
    SessionSticky,
    simulate,
)
from kvgraph.advisor.replay.trace import Trace
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.ranking.policy import Policy, Scores, Terms, View
from kvgraph.graph.tables.blocks import Selection
from kvgraph.graph.wire.events import (
    BlocksCleared,
    BlocksStored,
    EngineHello,
    RequestFinished,
    RequestStarted,
)
from made_traffic import agents, made, recent

SIZE, POOL = 16, 40


class Recent:
    """Lets go first what was used last: what a loop over too many contexts wants."""

    name = "recent"

    def observe(self, view: View) -> None:
        """Nothing to learn."""

    def scores(self, view: View, picked: Selection) -> Scores:
        """Minus the seconds since each was used."""
        return np.asarray(picked.last_used() - view.now)

    def terms(self, view: View, picked: Selection) -> Terms:
        """Nothing to explain."""
        return {}


class Noise(Recent):
    """Scores that mean nothing."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(5)

    def scores(self, view: View, picked: Selection) -> Scores:
        """At random."""
        return self._rng.random(len(picked))


class Fleet:
    """Engines with small pools and one sidecar, told turn by turn."""

    def __init__(self) -> None:
        self.now = 0.0
        self.guard = Guard("recent")
        self.graph = KVCacheGraph(policy=Recent(), referee=self.guard, clock=lambda: self.now)

    def join(self, engine: str, model: str = "m") -> None:
        self.graph.apply(engine, [EngineHello(engine, model, SIZE, POOL + 1, "v")])
        self.graph.rank(engine, 100)

    def turn(self, engine: str, first: int, count: int, found: int) -> None:
        packed = np.arange(first, first + count, dtype="<u8").tobytes()
        tokens = count * SIZE + 1
        self.now += 1.0
        self.graph.apply(
            engine,
            [
                RequestStarted(f"r{self.now}", packed, tokens, found * SIZE, SIZE),
                BlocksStored(packed, None, SIZE),
                RequestFinished(f"r{self.now}", packed, tokens, tokens, "stop"),
            ],
        )
        self.graph.rank(engine, 100)

    def loop(self, engine: str, rounds: int) -> None:
        """Five contexts that fit the pool only in part: LRU finds none of them."""
        for _ in range(rounds):
            for number in range(5):
                self.turn(engine, 1000 * (number + 1), 10, 0)

    def fitting(self, engine: str, rounds: int) -> None:
        """Three contexts that all fit, of which the engine finds nothing: LRU would find all."""
        for _ in range(rounds):
            for number in range(3):
                self.turn(engine, 1000 * (number + 1), 10, 0)

    def is_ranked(self, engine: str) -> bool:
        ruling = self.graph.ruling(engine)
        assert ruling is not None
        return ruling.policy_rules


def test_an_engine_begins_by_what_the_others_have_shown() -> None:
    fleet = Fleet()
    fleet.join("old")
    fleet.loop("old", 20)
    assert fleet.is_ranked("old")
    fleet.join("new")
    assert fleet.is_ranked("new"), "it has shown nothing itself"


def test_engines_of_another_model_do_not_count() -> None:
    fleet = Fleet()
    fleet.join("old")
    fleet.loop("old", 20)
    fleet.join("other", model="n")
    assert not fleet.is_ranked("other")


def test_what_an_engine_has_shown_goes_with_it() -> None:
    fleet = Fleet()
    fleet.join("old")
    fleet.loop("old", 20)
    fleet.graph.forget_engine("old")
    fleet.join("new")
    assert not fleet.is_ranked("new")


def test_an_engine_goes_back_to_lru_whatever_the_others_say() -> None:
    fleet = Fleet()
    fleet.join("old")
    fleet.loop("old", 20)
    fleet.join("new")
    fleet.fitting("new", 10)
    assert fleet.is_ranked("old")
    assert not fleet.is_ranked("new")
    fleet.loop("old", 20)
    fleet.fitting("new", 10)
    assert not fleet.is_ranked("new"), "it has decided, and decides for itself from now on"
    fleet.graph.apply("new", [BlocksCleared()])
    fleet.turn("new", 1, 10, 0)
    assert fleet.is_ranked("old")
    assert not fleet.is_ranked("new"), "also after a reset"


def trust(ahead: float, spread: float, capacity: int = 100) -> Trust:
    shown = Trust(capacity)
    for evidence in (shown.since, shown.ever):
        evidence.ahead, evidence.spread = ahead, spread
    return shown


def test_evidence_of_several_counts_as_that_of_one_engine_with_all_their_blocks() -> None:
    each = [trust(5.0, 36.0) for _ in range(4)]
    assert not each[0].is_due_for_change(), "one alone is within chance"
    assert each[0].may_begin(each)
    small = [trust(1.5, 1.0) for _ in range(4)]
    assert not small[0].may_begin(small), "2 % of four pools are eight blocks"


def test_an_engine_that_is_sure_of_lru_does_not_follow() -> None:
    others = [trust(500.0, 100.0) for _ in range(4)]
    doubtful, sure = trust(-5.0, 36.0), trust(-5.0, 16.0)
    assert doubtful.may_begin([*others, doubtful])
    assert not sure.may_begin([*others, sure])


def test_a_single_engine_decides_as_it_would_without_a_fleet() -> None:
    rng = np.random.default_rng(7)
    decided = set()
    for _ in range(300):
        alone = Trust(100)
        for _ in range(int(rng.integers(1, 30))):
            alone.note(int(rng.integers(-5, 6)), 10)
        decided.add(alone.is_due_for_change())
        assert alone.may_begin([alone]) == alone.is_due_for_change()
    assert decided == {True, False}


def found(trace: Trace, orders: list[EvictionOrder]) -> float:
    engines = [Instance(400, order) for order in orders]
    hits = simulate(trace, engines, router=SessionSticky(trace)).hits
    return float(hits.sum()) / trace.prompt_blocks


@pytest.mark.parametrize("policy", [Noise, Recent])
@pytest.mark.parametrize("maker", [agents, recent])
def test_nonsense_costs_a_fleet_next_to_nothing(
    tmp_path: Path, policy: type[Policy], maker: Any
) -> None:
    trace = made(tmp_path, maker(np.random.default_rng(4)))
    sidecar = SimulatedSidecar(trace, policy())
    advised = found(trace, [GraphOrder(sidecar) for _ in range(4)])
    assert advised >= found(trace, [LruOrder() for _ in range(4)]) - 0.005
