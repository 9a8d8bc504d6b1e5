"""Room for new context: no limit where nothing thrashes; else what live contexts leave."""

from __future__ import annotations

import logging
import math
import random
import re
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
from kvgraph.advisor.admission import LIVE_S, Admission, Demand, Valve, demand
from kvgraph.advisor.words.waits import admission_facts
from kvgraph.dashboards.metrics import engine_metrics
from kvgraph.dashboards.source import EngineStatus
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.tables.walks import Prompts
from kvgraph.graph.types import Tier
from kvgraph.graph.wire.advice import AdmissionAdvice
from kvgraph.graph.wire.events import (
    AdmissionReport,
    AnyEvent,
    BlocksCleared,
    BlocksRemoved,
    BlocksSpilled,
    BlocksStored,
    EngineHello,
    RequestFinished,
    RequestStarted,
)

SIZE = 16
CONTEXT = 1000  # blocks of a session's first prompt; each turn has one more
POOL = 10_400  # blocks: ten sessions


CROWD = Demand(14, 10, POOL, POOL // 10)  # live sessions, some of which the pool has no room for
SPARE = Demand(14, 5, POOL // 3, POOL // 10)


class Engine:
    """An LRU pool of whole sessions, and the graph that hears of it."""

    def __init__(
        self, name: str = "e", graph: KVCacheGraph | None = None, turns_a_block: int = 1,
        answer: int = 2,
    ) -> None:  # fmt: skip
        self.now = 100.0
        self.turns_a_block, self.answer = turns_a_block, answer
        self.name = name
        self.graph = graph or KVCacheGraph(clock=lambda: self.now)
        self.admission = Admission()
        self.held: OrderedDict[int, int] = OrderedDict()
        """Blocks of each session in the pool, the one that is idle for longest first."""
        self.turns: Counter[int] = Counter()  # of each session
        self.requests = 0
        self.tell(EngineHello(name, "m", SIZE, POOL + 1, ""))

    @property
    def column(self) -> int:
        return self.graph.tables.engines[self.name]

    def tell(self, *events: AnyEvent) -> None:
        self.graph.apply(self.name, list(events))

    def word(self) -> AdmissionAdvice:
        return self.admission.advise(self.graph.tables, self.column, self.now)

    def turn(self, session: int, *, named: bool = True, ended: bool = False,
             tool_s: float | None = None, seconds: float = 1.0) -> None:  # fmt: skip
        """A request of a session: found whole, or computed at the cost of who is idle longest."""
        more, rest = divmod(self.turns[session], self.turns_a_block)
        chain = keys(session, more)
        blocks = len(chain) // 8
        self.turns[session] += 1
        found = self.held.pop(session, 0)
        while sum(self.held.values()) + blocks > POOL:
            gone, count = self.held.popitem(last=False)
            self.tell(BlocksRemoved(keys(gone)[: 8 * count]))
        self.held[session] = blocks
        self.requests += 1
        name, request = f"s{session}" if named else None, f"r{self.requests}"
        tokens = blocks * SIZE + 1 + 3 * rest
        self.tell(RequestStarted(request, chain, tokens, found * SIZE, SIZE, session=name))
        self.tell(BlocksStored(chain, None, SIZE))
        self.now += seconds
        self.tell(
            RequestFinished(
                request, chain, tokens, tokens + self.answer, "stop", session=name,
                session_ended=ended,
                waiting_for_tool=None if tool_s is None else True, expected_return_s=tool_s,
            )
        )  # fmt: skip
        self.word()

    def rounds(self, sessions: int, rounds: int, *, named: bool = True) -> None:
        for _ in range(rounds):
            for session in range(sessions):
                self.turn(session, named=named)


def keys(session: int, turn: int = 999) -> bytes:
    first = 1 + session * 100_000
    return np.arange(first, first + CONTEXT + turn, dtype="<u8").tobytes()


def test_everybody_may_start_where_contexts_fit() -> None:
    engine = Engine()
    engine.rounds(9, 20)
    word = engine.word()
    assert word.room_blocks is None
    assert (word.live_sessions, word.fitting_sessions) == (9, 10)


def test_new_sessions_alone_are_no_regret() -> None:
    engine = Engine()
    for session in range(300):
        engine.turn(session)
        assert engine.word().room_blocks is None


def feed(
    valve: Valve, prompts: Prompts, times: int, wanted: Demand = CROWD, *, asked: float = 0.25,
    computed: float = 0.0, again: float = 0.0, waits: bool | None = None,
) -> None:  # fmt: skip
    """Tell a valve ``times`` of more prompts, in pools."""
    for _ in range(times):
        prompts.asked += round(asked * POOL)
        prompts.computed += round(computed * POOL)
        prompts.again += round(again * POOL)
        valve.update(prompts, wanted, waits=waits)


@pytest.mark.parametrize(
    ("again", "queued", "closes"),
    [(0.1, 0.0, False), (0.1, 0.25, False), (0.1, 0.8, True), (0.05, 0.8, False)],
)
def test_a_long_queue_of_lost_contexts_closes_before_it_is_computed(
    again: float, queued: float, closes: bool
) -> None:
    """As soon as prompts that were computed confirm that contexts are lost."""
    valve, asked = Valve(POOL), 2 * POOL
    valve.update(
        Prompts(asked, asked, round(again * asked)), CROWD, waits=False, queued=POOL,
        again=round(queued * POOL),
    )  # fmt: skip
    assert (valve.limit is not None) == closes


@pytest.mark.parametrize(("waits", "opens"), [(None, True), (False, True), (True, False)])
def test_a_limit_stays_while_requests_wait_for_room(waits: bool | None, opens: bool) -> None:
    """One that fits in no room yet is no sign that there is room for all."""
    valve, prompts = Valve(POOL), Prompts(POOL, POOL, POOL // 2)
    valve.update(prompts, CROWD)
    assert valve.limit is not None
    feed(valve, prompts, 40, SPARE, asked=0.5, computed=0.5, waits=waits)
    assert (valve.limit is None) == opens


def test_a_limit_falls_while_most_of_what_is_computed_had_been_computed() -> None:
    """Agents find most of their prompts: a twentieth of all that they ask is much of the rest."""
    limits = []
    for computed_again in (0.4, 0.05):
        valve, prompts = Valve(POOL), Prompts(POOL, POOL, POOL // 2)
        valve.update(prompts, Demand(14, 10, 8 * POOL // 10, POOL // 10))
        again = computed_again / 16
        feed(valve, prompts, 60, asked=0.5, computed=1 / 16, again=again, waits=True)
        assert valve.regret < 0.06
        limits.append(valve.limit)
    assert limits[0] == POOL / 2
    assert limits[1] == 1.1 * POOL


@pytest.mark.parametrize(("computed", "wasted"), [(0.2, 1.0), (0.1, 1.0), (0.05, 0.5)])
def test_hardly_anything_computed_is_hardly_any_waste(computed: float, wasted: float) -> None:
    """A tenth of a pool is the least that waste is a share of."""
    valve, blocks = Valve(POOL), round(computed * POOL)
    valve.update(Prompts(POOL, blocks, blocks), CROWD)
    assert valve.wasted == pytest.approx(wasted)


@pytest.mark.parametrize("named", [True, False])
def test_a_thrashing_engine_has_no_room(named: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    engine = Engine()
    engine.rounds(14, 4, named=named)
    word = engine.word()
    assert word.room_blocks == 0
    assert word.live_sessions == 14
    assert word.fitting_sessions <= 10
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert "are live" in said[0]


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("answer", [2, 40])
def test_turns_that_add_less_than_a_block_are_turns(named: bool, answer: int) -> None:
    """Also where most of the answer does not come back: a template that drops the thoughts."""
    engine = Engine(turns_a_block=5, answer=answer)
    engine.rounds(14, 5, named=named)
    assert engine.word().room_blocks == 0


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("questions", [1, 5], ids=["the same one", "shorter than a block"])
def test_texts_that_are_asked_about_in_turn_are_no_regret(named: bool, questions: int) -> None:
    """Fourteen texts, of which ten fit."""
    engine, rng = Engine(turns_a_block=5), random.Random(1)
    for _ in range(15):
        for text in range(14):
            engine.turns[text] = rng.randrange(questions)
            engine.turn(text, named=named)
            assert engine.word().room_blocks is None


def test_sessions_that_are_over_make_room_and_calm_opens(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    engine = Engine()
    engine.rounds(14, 3)
    for session in range(6, 14):
        engine.turn(session, ended=True)
    room = engine.word().room_blocks
    assert room is not None
    assert room >= CONTEXT, "those that are over want nothing"
    engine.rounds(6, 40)
    assert engine.word().room_blocks is None
    assert "nobody needs to wait" in caplog.records[-1].getMessage()


def test_who_is_silent_for_long_makes_room_by_and_by() -> None:
    engine = Engine()
    engine.rounds(14, 3)
    engine.now += LIVE_S / 2
    before = demand(engine.graph.tables, engine.column, engine.now)
    assert 0 < before.blocks < before.warm * CONTEXT
    engine.now += LIVE_S
    after = demand(engine.graph.tables, engine.column, engine.now)
    assert (after.live, after.blocks) == (0, 0)


def test_a_tool_that_takes_long_keeps_its_context_wanted() -> None:
    engine = Engine()
    engine.turn(0, tool_s=200.0)
    engine.turn(1)
    engine.now += 190.0
    found = demand(engine.graph.tables, engine.column, engine.now)
    idle = math.exp(-190.0 / 300.0)
    assert found.blocks == pytest.approx(CONTEXT * (1 + idle), abs=0.6)


def test_a_context_that_is_gone_wants_nothing_here() -> None:
    engine = Engine()
    engine.rounds(12, 1)
    found = demand(engine.graph.tables, engine.column, engine.now)
    assert (found.live, found.warm, found.usual) == (12, 10, CONTEXT)


def test_an_emptied_cache_is_nobodys_regret() -> None:
    engine = Engine()
    engine.rounds(9, 10)
    engine.tell(BlocksCleared())
    engine.held.clear()
    engine.rounds(9, 3)
    assert engine.word().room_blocks is None


def test_what_a_tier_holds_is_no_regret() -> None:
    engine = Engine()
    for session in range(14):
        engine.turn(session)
        engine.tell(BlocksSpilled(keys(session), int(Tier.WARM), 1))
    engine.rounds(14, 3)
    assert engine.word().room_blocks is None


@pytest.mark.parametrize("told", [{"reads_cache": False}, {"loading_tokens": CONTEXT * SIZE}])
def test_what_another_store_loads_or_nobody_looks_for_is_no_regret(told: dict[str, int]) -> None:
    engine = Engine()
    tokens = CONTEXT * SIZE + 1
    for number in range(100):
        name, chain = f"r{number}", keys(number % 5, number // 5)
        engine.tell(
            RequestStarted(name, chain, tokens, 0, SIZE, session=f"s{number % 5}", **told),
            BlocksStored(chain, None, SIZE),
        )
        engine.now += 1.0
        engine.tell(RequestFinished(name, chain, tokens, tokens + 2, "stop"))
        engine.word()
    assert engine.word().room_blocks is None


def test_a_limit_that_saves_nothing_is_lifted_for_long() -> None:
    """A hundred sessions turn after turn: whoever waits, none of their contexts stays."""
    valve, prompts, closed = Valve(POOL), Prompts(0, 0, 0), []
    for _ in range(400):
        crowd = Demand(100, 10, POOL, POOL // 10)
        feed(valve, prompts, 1, crowd, computed=0.25, again=0.9 / 4)
        closed.append(valve.limit is not None)
    assert any(closed[:20])
    assert sum(closed[100:]) < 0.15 * len(closed[100:])


def fail(valve: Valve, prompts: Prompts, times: int) -> list[int]:
    """Traffic of which a limit saves nothing; returns for how long each failure bars it."""
    barred: list[int] = []
    crowd = Demand(100, 10, POOL, POOL // 10)
    while len(barred) < times:
        was_closed = valve.limit is not None
        feed(valve, prompts, 1, crowd, computed=0.25, again=0.25, waits=True)
        if was_closed and valve.limit is None:
            barred.append(valve.barred_pools)
    return barred


@pytest.mark.parametrize(
    ("meanwhile", "pools", "barred"),
    [("it helps", 129, 32), ("nothing is lost for long", 270, 32), ("little changes", 140, 256)],
)
def test_failures_of_other_traffic_are_forgotten(meanwhile: str, pools: int, barred: int) -> None:
    valve, prompts = Valve(POOL), Prompts(POOL, POOL, POOL // 2)
    assert fail(valve, prompts, 3) == [32, 64, 128]
    feed(valve, prompts, 4 * pools, Demand(10, 10, POOL // 2, POOL // 10), waits=False)
    if meanwhile == "it helps":
        feed(valve, prompts, 8, computed=0.25, again=0.25, waits=True)
        assert valve.limit is not None
        feed(valve, prompts, 60, SPARE, waits=False)
        assert valve.limit is None
    assert fail(valve, prompts, 1) == [barred]


def test_the_log_says_that_waiting_saves_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """It is lifted, but not because sessions have room."""
    engine = Engine()
    with caplog.at_level(logging.INFO):
        engine.rounds(20, 6)
    closed, lifted = [record.getMessage() for record in caplog.records][:2]
    assert "of its prompts again: " in closed
    assert re.search(r"computes \d\d % of its prompts again although it was told to let", lifted)
    assert "need not for the next 32 pools' worth of prompts" in lifted
    assert caplog.records[1].levelno == logging.WARNING
    assert engine.word().room_blocks is None


def test_a_limit_is_on_trial_only_while_requests_are_held() -> None:
    """Prompts must queue before an engine holds any: until then nothing can be saved."""
    engine = Engine()
    engine.tell(AdmissionReport(0, 0, 0.0, 0, (0,) * 7, 0.0, 0.0, 900))
    engine.rounds(20, 8)
    assert engine.word().room_blocks == 0, "nobody was held"
    for held in range(1, 81):
        engine.tell(AdmissionReport(1, 9, 0.0, held, (0,) * 7, 0.0, 0.0, 900))
        engine.turn(held % 20)
    assert engine.word().room_blocks is None


def test_a_limit_that_saves_contexts_stays() -> None:
    valve, prompts = Valve(POOL), Prompts(0, 0, 0)
    for _ in range(100):
        again = 0.9 if valve.limit is None else 0.2
        feed(valve, prompts, 1, computed=0.25, again=again / 4)
    assert valve.limit is not None


def test_what_another_engine_computed_is_no_regret() -> None:
    first = Engine("first")
    second = Engine("second", first.graph)
    second.turns = first.turns
    for number in range(10):
        for session in range(5):
            engine = (first, second)[number % 2]
            engine.held.pop(session, None)
            engine.turn(session)
            assert engine.word().room_blocks is None


def test_engines_thrash_each_for_itself() -> None:
    busy = Engine("busy")
    calm = Engine("calm", busy.graph)
    for _ in range(4):
        for session in range(14):
            busy.turn(session)
        calm.turn(50)
    assert busy.word().room_blocks == 0
    assert busy.admission.advise(calm.graph.tables, calm.column, busy.now).room_blocks is None


def test_an_unchanged_graph_is_asked_again_where_nobody_has_room_or_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = 0

    def counted(*told: Any) -> Demand:
        nonlocal looks
        looks += 1
        return demand(*told)

    monkeypatch.setattr("kvgraph.advisor.admission.demand", counted)

    def looked(engine: Engine, *versions: int | None, seconds: float = 0.5) -> int:
        nonlocal looks
        looks = 0
        for version in versions:
            engine.now += seconds
            tables = engine.graph.tables
            word = engine.admission.advise(tables, engine.column, engine.now, version)
            assert word.ts == engine.now
        return looks

    roomy, full = Engine(), Engine()
    roomy.rounds(9, 4)
    full.rounds(20, 20)
    assert looked(roomy, 1, 1, 1, 2, 2) == 2
    assert looked(roomy, 2, 2, 2, seconds=6.0) == 3
    assert looked(roomy, None, None) == 2, "nobody counts"
    assert full.word().room_blocks is not None
    assert looked(full, 1, 1, 1) == 3


def test_an_engine_in_the_place_of_one_that_is_gone_begins_open() -> None:
    engine = Engine()
    engine.rounds(14, 3)
    engine.graph.forget_engine("e")
    engine.admission.forget_all_but(set())
    engine.held.clear()
    engine.tell(EngineHello("e", "m", SIZE, POOL + 1, ""))
    engine.rounds(5, 2)
    assert engine.word().room_blocks is None


def test_one_session_larger_than_the_pool_says_something_sane() -> None:
    engine = Engine()
    chain = np.arange(1, 3 * POOL, dtype="<u8").tobytes()
    for number in range(6):
        engine.tell(RequestStarted(f"r{number}", chain, 3 * POOL * SIZE, 0, SIZE, session="huge"))
        engine.tell(RequestFinished(f"r{number}", chain, 3 * POOL * SIZE, 3 * POOL * SIZE, "stop",
                                    session="huge"))  # fmt: skip
        engine.now += 1.0
        word = engine.word()
        assert word.room_blocks is None or word.room_blocks >= 0
        assert word.fitting_sessions >= 0


REPORT = {
    "waiting": 7, "waiting_blocks": 210, "oldest_s": 12.4, "held": 40, "released": [20, 10, 3],
    "waited_s": 900.0, "longest_s": 119.6, "not_held": 960, "queued_share": 0.414,
}  # fmt: skip


def facts(room: int | None, report: dict[str, Any] | None, lifted: int = 0) -> dict[str, str]:
    said = {
        "room_blocks": room, "live_sessions": 38, "fitting_sessions": 31, "again": 0.41,
        "lifted_pools": lifted,
    }  # fmt: skip
    return admission_facts({"room": said, "graph": {"admission": report}})


def test_a_closed_engine_says_who_waits_and_why() -> None:
    assert facts(120, REPORT) == {
        "room": "for 120 blocks of new context: 31 agents fit, 38 are live",
        "computed again": "41% of the latest prompts",
        "held": "7, the first for 12 s, 210 blocks",
        "held so far": "40 of 1,000, 120 s at most",
        "wait no longer": "room 20, bound 10, idle 3",
        "meet a queue": "41% of the latest requests; from 40% on new ones may "
        "wait, and then until it is below 15%",
    }
    said = facts(0, {**REPORT, "oldest_s": 200.0})
    assert said["held so far"] == "40 of 1,000, 200 s at most", "who waits now counts"


def test_an_open_one_says_so_and_for_how_long_a_limit_is_lifted_and_why() -> None:
    idle = {**REPORT, "waiting": 0}
    said = facts(None, idle)
    assert said["room"] == "no limit: 31 agents fit, 38 are live"
    assert said["held"] == "nobody"
    assert facts(None, idle, lifted=30)["room"] == (
        "no limit for the next 30 pools' worth of prompts, since one saved nothing: 31 agents fit, "
        "38 are live"
    )


def test_a_thrashing_engine_that_holds_nobody_is_shown_and_others_are_not() -> None:
    off = "nobody waits: admission is off there (AITHER_KVCACHE_ADMISSION)"
    assert facts(0, None)["held"] == off
    assert facts(None, None) == {}
    assert admission_facts({"room": None, "graph": None}) == {}


def test_metrics_name_room_only_where_it_is_limited() -> None:
    lifted = AdmissionAdvice(1, 0.0, None, 3, 9, again=0.84, lifted_pools=30)
    said = [("a", lifted), ("b", AdmissionAdvice(2, 0.0, 40, 9, 7, again=0.41))]
    engines = [EngineStatus(i, "", "", "", "hook", "synced", None, 0, 0, room=r) for i, r in said]
    values = {
        (sample.name.removeprefix("kvgraph_admission_"), sample.labels["engine"]): sample.value
        for family in engine_metrics(engines)
        for sample in family.samples
        if sample.name.startswith("kvgraph_admission_")
    }
    assert values == {
        ("live_sessions", "a"): 3, ("live_sessions", "b"): 9,
        ("fitting_sessions", "a"): 9, ("fitting_sessions", "b"): 7,
        ("closed", "a"): 0, ("closed", "b"): 1,
        ("computed_again", "a"): 0.84, ("computed_again", "b"): 0.41,
        ("lifted_pools", "a"): 30, ("lifted_pools", "b"): 0, ("room_blocks", "b"): 40,
    }  # fmt: skip
