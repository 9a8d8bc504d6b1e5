"""What the first screen says needs attention, and what is said of samples, copies and speeds."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

import numpy as np
import pytest
from kvgraph.advisor.page.attention import notices
from kvgraph.advisor.page.engines import EngineView, engines_of
from kvgraph.advisor.page.now import RoomView, now_of, prefill_rate
from kvgraph.advisor.page.page import Page
from kvgraph.advisor.page.sampled import sampled_of
from kvgraph.advisor.page.sessions import session_of
from kvgraph.advisor.words.words import beside_lru, ranker
from kvgraph.dashboards.source import EngineStatus
from kvgraph.graph.errors import GraphError
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.ranking.policy import PolicyChoice
from kvgraph.graph.tables.sessions import LIMIT, CopyLog
from kvgraph.graph.tables.tables import Tables
from kvgraph.graph.types import SourceLayer, Tier
from kvgraph.graph.wire.advice import AdmissionAdvice
from kvgraph.graph.wire.events import (
    AdmissionReport,
    AdviceApplied,
    BlocksAttended,
    BlocksResident,
    BlocksSpilled,
    ConfidenceSampled,
    CopiesDropped,
    EngineHello,
    Pressure,
    RequestHeld,
    RequestReleased,
    RequestStarted,
    Segment,
)
from page_app import engine_status, sidecar_status
from small_world import SIZE, World, pack, page_over
from turns import turn_events


@pytest.fixture
def graph() -> KVCacheGraph:
    graph = KVCacheGraph()
    graph.apply("e", [EngineHello("gpu-0", "m", 16, 100, "v")])
    return graph


def engine_of(graph: KVCacheGraph, **limited: int) -> EngineStatus:
    stats = graph.stats().engines["e"]
    known = replace(stats, limited={**stats.limited, **limited})
    return engine_status(graph, name="gpu-0", graph=known, ranked_by="lifecycle")


def said(graph: KVCacheGraph, **limited: int) -> list[str]:
    return said_of(graph, engine_of(graph, **limited))


def said_of(graph: KVCacheGraph, *engines: EngineStatus) -> list[str]:
    status = sidecar_status(graph, *engines)
    return [notice.text for notice in notices(graph.tables, status, graph.clock())]


def test_nothing_does_where_all_is_well_or_the_graph_infers_it_itself(graph: KVCacheGraph) -> None:
    assert said(graph) == []
    assert said(graph, inferred=40) == []


def asked(graph: KVCacheGraph, count: int, shared: int, found: int) -> None:
    """So many requests of eight blocks, of which they share the first ones, and find some."""
    for number in range(count):
        own = range(10**6 + 8 * number, 10**6 + 8 * number + 8 - shared)
        cached = found if number else 0
        turn = turn_events(f"s{number}", *range(1, 1 + shared), *own, found=cached, more=1)
        graph.apply("e", turn)


def test_prompts_that_begin_alike_and_find_nothing_are_told(graph: KVCacheGraph) -> None:
    asked(graph, 60, shared=4, found=0)
    (text,) = [each for each in said(graph) if "finds nothing" in each]
    assert text.startswith("gpu-0: It finds nothing: of 60 requests in the last ten minutes 59 ")


def test_sessions_that_begin_otherwise_each_time_are_told_so(graph: KVCacheGraph) -> None:
    for number in range(60):
        keys = range(10**6 + 8 * number, 10**6 + 8 * number + 8)
        graph.apply("e", turn_events("s", *keys, more=1, request=f"r{number}"))
    (text,) = [each for each in said(graph) if "finds nothing" in each]
    assert "59 went on with a session, but began otherwise than its prompts before" in text
    assert "a date or an id" in text


@pytest.mark.parametrize(
    ("count", "shared", "found"),
    [(40, 4, 0), (60, 0, 0), (60, 4, 4), (60, 4, 1)],
    ids=["too few", "nothing in common", "all is found", "some is found"],
)
def test_nothing_is_told_of_prompts_that_could_not_find_more_or_did(
    graph: KVCacheGraph, count: int, shared: int, found: int
) -> None:
    asked(graph, count, shared, found)
    assert not [each for each in said(graph) if "finds nothing" in each]


def test_the_limit_of_protection_that_was_hit_is_named(graph: KVCacheGraph) -> None:
    (text,) = said(graph, tenant=55)
    assert text.startswith("gpu-0: More blocks are named as protected than are kept: 55 beyond a")
    assert "score.tenant_share" in text
    assert "score.protected_share" not in text
    (text,) = said(graph, tenant=5, all=1_200)
    assert "1,200 beyond what its price allows, or score.protected_share" in text


def test_engines_that_hash_blocks_differently_are_named_with_a_remedy(graph: KVCacheGraph) -> None:
    def shown(*kinds: str) -> list[str]:
        engines = (
            replace(engine_of(graph), name=f"gpu-{number}", hashing=kind)
            for number, kind in enumerate(kinds)
        )
        return said_of(graph, *engines)

    assert shown("a", "a", "") == []
    (text,) = shown("a", "b")
    assert "('gpu-0': a; 'gpu-1': b)" in text
    assert text.endswith("PYTHONHASHSEED (xxhash: it must be set).")


@pytest.mark.parametrize("state", ["partial", "degraded"])
def test_history_that_is_lost_for_good_is_said_in_words(graph: KVCacheGraph, state: str) -> None:
    watched = replace(engine_of(graph), kind="kv_events", state=state, ranking_age_s=None)
    (text,) = said_of(graph, watched)
    assert text == "gpu-0: " + summary(graph, watched)
    assert "lost for good, so its counts are incomplete" in text
    assert state not in text
    assert view_of(graph, watched).guard == "takes no advice"


def test_advice_is_stale_after_the_same_time_in_words_and_number(graph: KVCacheGraph) -> None:
    def shown(age_s: float) -> tuple[float, int]:
        status = sidecar_status(graph, replace(engine_of(graph), ranking_age_s=age_s))
        now = now_of(page_over(graph, status=lambda: status))
        return now.stale_s, len(now.attention)

    stale_s, _ = shown(0.0)
    assert [shown(age_s)[1] for age_s in (stale_s - 0.1, stale_s + 0.1)] == [0, 1]


def begin(graph: KVCacheGraph, name: str, waited_s: float) -> None:
    graph.apply("e", [RequestStarted(name, b"", 20, 0, 16, waited_s=waited_s)])


def test_a_queue_is_named_when_many_feel_it(graph: KVCacheGraph) -> None:
    for number in range(20):
        begin(graph, f"fast{number}", 0.2)
    for number, waited_s in enumerate((1.5, 4.0)):
        begin(graph, f"slow{number}", waited_s)
    assert said(graph) == [], "two of 22 are an accident"
    begin(graph, "slow2", 2.0)
    (text,) = said(graph)
    assert "3 of the 23 requests that began in the last minute had waited" in text
    assert "longer than 1 s, the longest 4.0 s" in text


def test_who_was_held_for_room_did_not_queue(graph: KVCacheGraph) -> None:
    for number in range(4):
        held = RequestHeld(f"r{number}", 3)
        graph.apply("e", [held, RequestReleased(f"r{number}", 8.0, "room")])
        begin(graph, f"r{number}", 8.5)
    assert said(graph) == []


def rooms_of(graph: KVCacheGraph, engine: EngineStatus) -> list[RoomView]:
    status = sidecar_status(graph, engine)
    return now_of(page_over(graph, status=lambda: status)).rooms


def test_nothing_is_said_of_room_where_admission_never_held_anybody(graph: KVCacheGraph) -> None:
    graph.apply("e", [AdmissionReport(0, 0, 0.0, 0, (0,) * 7, 0.0, 0.0, 900)])
    graph.apply("e", [RequestStarted("r", b"", 20, 0, 16, waited_s=9.0)])
    never = replace(engine_of(graph), room=AdmissionAdvice(1, 0.0, None, 3, 31))
    assert rooms_of(graph, never) == []
    assert view_of(graph, never).admission is None


def test_who_waits_for_room_is_told_with_what_fits(graph: KVCacheGraph) -> None:
    graph.apply("e", [AdmissionReport(7, 210, 12.4, 40, (20, 13), 900.0, 119.6, 960)])
    (room,) = rooms_of(graph, replace(engine_of(graph), room=AdmissionAdvice(1, 0.0, 0, 38, 31)))
    assert (room.waiting, room.oldest_s, room.fitting, room.live) == (7, 12.4, 31, 38)
    assert room.sentence == (
        "7 requests wait for room, the first for 12 s by now: 31 sessions fit, 38 are live."
    )
    graph.apply("e", [AdmissionReport(1, 210, 12.4, 40, (20, 13), 900.0, 119.6, 960)])
    (room,) = rooms_of(graph, replace(engine_of(graph), room=AdmissionAdvice(1, 0.0, 0, 1, 1)))
    assert room.sentence == "1 request waits for room, for 12 s by now: 1 session fits, 1 is live."


def test_who_waited_lately_is_told_for_ten_minutes() -> None:
    now = [0.0]
    graph = KVCacheGraph(clock=lambda: now[0])
    graph.apply("e", [EngineHello("gpu-0", "m", 16, 100, "v")])
    for request, waited_s in (("first", 48.0), ("second", 2.0)):
        graph.apply("e", [RequestHeld(request, 3), RequestReleased(request, waited_s, "room")])
        graph.apply("e", [RequestStarted(request, b"", 20, 0, 16, waited_s=waited_s)])
        now[0] += 300
    (room,) = rooms_of(graph, engine_of(graph))
    assert (room.waiting, room.fitting, room.begun, room.longest_s) == (0, None, 2, 48.0)
    assert room.sentence == (
        "Nobody waits for room now. 2 requests of the last 10 min began after a wait for room, of "
        "at most 48 s."
    )
    assert rooms_of(graph, replace(engine_of(graph), id="another")) == []
    now[0] += 1
    (room,) = rooms_of(graph, engine_of(graph))
    assert room.sentence.endswith(
        " 1 request of the last 10 min began after a wait for room, of 2.0 s."
    )
    now[0] += 300
    assert rooms_of(graph, engine_of(graph)) == []


def test_an_engine_says_why_those_it_held_wait_no_longer(graph: KVCacheGraph) -> None:
    graph.apply("e", [AdmissionReport(7, 210, 12.4, 40, (20, 13), 900.0, 119.6, 960)])
    room = AdmissionAdvice(1, 0.0, 120, 38, 31)
    admission = view_of(graph, replace(engine_of(graph), room=room)).admission
    assert [(end.reason, end.requests) for end in admission.ends] == [("room", 20), ("bound", 13)]
    assert admission.ends[0].until == "until there was room"
    assert admission.facts["held so far"] == "40 of 1,000, 120 s at most"
    assert "wait no longer" not in admission.facts, "the reasons say it"


def summary(graph: KVCacheGraph, engine: EngineStatus) -> str:
    return view_of(graph, engine).summary


def view_of(graph: KVCacheGraph, engine: EngineStatus) -> EngineView:
    status = sidecar_status(graph, engine)
    (view,) = engines_of(page_over(graph, status=lambda: status)).engines
    return view


def test_an_engine_says_who_ranks_and_what_it_does(graph: KVCacheGraph) -> None:
    graph.apply("e", [Pressure(100, 50, 50, 12, 1)])
    assert summary(graph, engine_of(graph)) == (
        "Connected. lifecycle ranks its blocks; the last ranking is 0.3 s old. "
        "12 requests run, 1 waits."
    )


def test_the_guard_speaks_alike_everywhere(graph: KVCacheGraph) -> None:
    behind = replace(engine_of(graph), ranked_by="lru", ruling=PolicyChoice(False, -12.3, 1))
    view = view_of(graph, behind)
    assert (view.ranked_by, view.guard) == ("lru", "12 blocks behind LRU over the last requests")
    (text,) = said_of(graph, behind)
    assert view.guard in text
    assert view.summary.startswith("Connected. LRU ranks")
    assert view_of(graph, engine_of(graph)).guard == "guard is off"
    assert view_of(graph, replace(behind, ruling=None)).guard == "nothing to compare yet"


def test_no_number_of_blocks_has_a_sign() -> None:
    said = [beside_lru(ahead) for ahead in (1234.0, 1.2, 0.3, -0.6, -12.0)]
    assert said == [
        "1,234 blocks ahead of LRU", "1 block ahead of LRU", "level with LRU",
        "1 block behind LRU", "12 blocks behind LRU",
    ]  # fmt: skip
    assert [ranker(name) for name in ("lru", "classic")] == ["LRU", "classic"]


def test_events_that_never_arrived_are_named_for_ten_minutes(world: World) -> None:
    def said() -> list[str]:
        engine = engine_status(world.graph, name="gpu-0")
        return [each for each in said_of(world.graph, engine) if "never arrived" in each]

    def counted(dropped: int) -> None:
        world.graph.apply("e", [AdviceApplied(1, 0, 0, 0, 0, dropped)])

    counted(0)
    assert said() == []
    counted(7)
    world.now += 500
    counted(7)
    (text,) = said()
    assert text.startswith("gpu-0: 7 of its events since its start never arrived, the last of them")
    world.now += 101
    assert said() == [], "the resync was long ago"
    counted(8)
    assert len(said()) == 1


def test_an_engine_that_went_is_named_for_ten_minutes(graph: KVCacheGraph) -> None:
    status = sidecar_status(graph, lost={"gpu-c": 40.0, "gpu-d": 3600.0})
    (said,) = notices(graph.tables, status, graph.clock())
    assert said.level == "warning"
    assert said.text.startswith("gpu-c went 40 s ago, or fell silent")
    (text,) = said_of(graph)
    assert text.startswith("No engine is connected.")


def tables_of(**rates: float) -> Tables:
    graph = KVCacheGraph()
    for name, rate in rates.items():
        hello = EngineHello(name, "m", 16, 100, "v")
        graph.apply(name, [hello, Pressure(1, 1, 1, 1, 1, rate)])
    return graph.tables


def test_an_engine_without_tiers_tells_its_rate_with_its_load() -> None:
    tables = tables_of(a=3000.0, b=0.0, c=1000.0)
    assert prefill_rate(tables) == 2000.0
    told = [tables.history.reports(name).prefill_tokens_per_s for name in ("a", "b", "gone")]
    assert told == [3000.0, 0.0, 0.0]
    assert prefill_rate(tables_of(a=0.0)) is None, "nobody measured it yet"


RULES = Segment(int(SourceLayer.RULES), 0, 2 * SIZE, name="house rules")


def look(world: World, keys: tuple[int, ...], mass: tuple[float, ...]) -> None:
    world.tell(BlocksAttended(pack(*keys), np.array(mass, dtype="<f4").tobytes()))


def test_where_nobody_samples_there_is_nothing(world: World, page: Page) -> None:
    world.serve(1, 2, 3)
    view = sampled_of(page, 10)
    assert (view.layers, view.blocks, view.sessions, view.confidence) == ([], [], [], None)


def test_layers_and_blocks_are_told_by_how_much_it_looks_at_them(world: World, page: Page) -> None:
    world.serve(1, 2, 3, 4, segments=(RULES,))
    for _ in range(5):
        look(world, (1, 2, 3, 4), (0.5, 0.25, 0.15, 0.1))
    world.evict(4)
    view = sampled_of(page, 3)
    assert [(each.layer, each.blocks) for each in view.layers] == [("rules", 2), ("user_turn", 2)]
    assert [each.attention for each in view.layers] == pytest.approx([0.75, 0.25], abs=0.001)
    assert [int(each.key, 16) for each in view.blocks] == [1, 2, 3]
    assert (view.blocks[0].identity, view.blocks[0].session) == ("house rules", "s")
    assert [each.in_pool for each in sampled_of(page, 4).blocks] == [True, True, True, False]
    assert view.edges["co_attend"] > 0


def test_the_least_sure_session_is_first(world: World, page: Page) -> None:
    for session, sure in (("calm", 0.9), ("lost", 0.3), ("unsampled", None)):
        world.serve(1, 2, session=session)
        if sure is not None:
            world.tell(ConfidenceSampled(b"", sure, session=session))
    view = sampled_of(page, 10)
    found = [(each.session, each.confidence) for each in view.sessions]
    assert found == [("lost", 0.3), ("calm", 0.9)]
    assert view.confidence == pytest.approx(0.6)


def test_of_one_session_only_what_it_holds_is_told(world: World, page: Page) -> None:
    for session, keys in (("one", (1, 2)), ("other", (3, 4))):
        world.serve(*keys, session=session)
        look(world, keys, (0.6, 0.4))
        world.tell(ConfidenceSampled(b"", 0.5, session=session))
    view = sampled_of(page, 10, "other")
    assert [int(each.key, 16) for each in view.blocks] == [3, 4]
    assert [each.session for each in view.sessions] == ["other"]
    with pytest.raises(GraphError, match="no session of that name"):
        sampled_of(page, 10, "nobody")


WARM, COLD = int(Tier.WARM), int(Tier.COLD)


def held(page: Page) -> list[tuple[int, int, int]]:
    """Blocks in the pool, with warm and with cold copies, as one followed the other."""
    view = session_of(page, "s", None).residency
    assert view.starts == sorted(view.starts)
    assert len(view.starts) == len(view.pool) == len(view.warm) == len(view.cold)
    steps = zip(view.pool, view.warm, view.cold, strict=True)
    return [step for step, _ in groupby(steps)]


def test_a_sessions_own_copies_come_and_go(world: World, page: Page) -> None:
    world.serve(1, 2, 3)
    world.serve(8, 9, session="another's")
    world.tell(BlocksSpilled(pack(2, 3), WARM, 100))
    world.tell(BlocksSpilled(pack(2), WARM, 100))  # told twice
    world.evict(3)
    world.tell(BlocksSpilled(pack(3), COLD, 100))
    world.tell(CopiesDropped(pack(3), WARM, 1))
    world.serve(1, 2, 3, found=2)
    world.tell(BlocksSpilled(pack(8, 9), WARM, 100))
    assert held(page) == [(3, 0, 0), (3, 2, 0), (2, 2, 0), (2, 2, 1), (2, 1, 1), (3, 1, 1)]


def test_a_copy_is_there_until_the_last_engine_dropped_it(world: World, page: Page) -> None:
    world.serve(1)
    for engine in ("a", "b"):
        world.tell(BlocksSpilled(pack(1), WARM, 100), engine=engine)
    world.tell(CopiesDropped(pack(1), WARM, 1), engine="b")
    world.tell(CopiesDropped(pack(1), WARM, 1), engine="b")  # which it does not have
    assert held(page) == [(1, 0, 0), (1, 1, 0)]
    world.tell(CopiesDropped(pack(1), WARM, 1))
    assert held(page) == [(1, 0, 0), (1, 1, 0), (1, 0, 0)]


def test_copies_of_an_engine_that_is_gone_are_gone(world: World, page: Page) -> None:
    world.serve(1, 2)
    world.tell(BlocksSpilled(pack(1, 2), COLD, 100))
    world.now += 10
    world.graph.forget_engine("a")
    assert held(page)[-1] == (0, 0, 0)
    assert (2, 0, 2) in held(page)


def test_an_engine_that_lists_its_pool_announces_its_copies_again(world: World, page: Page) -> None:
    world.serve(1, 2)
    world.tell(BlocksSpilled(pack(1, 2), WARM, 100))
    world.tell(BlocksResident(pack(1, 2)))
    world.tell(BlocksSpilled(pack(1), WARM, 100))
    assert held(page) == [(2, 0, 0), (2, 2, 0), (2, 0, 0), (2, 1, 0)]


def test_the_log_is_bounded_and_keeps_the_last() -> None:
    log = CopyLog()
    assert len(log.changes()) == 0
    for start in range(0, 3 * LIMIT, 1000):
        log.add(np.arange(start, start + 1000, dtype=np.uint64), Tier.WARM, 1, float(start))
    keys = log.changes()["key"]
    assert len(keys) == LIMIT
    assert np.array_equal(np.diff(keys.astype(np.int64)), np.ones(LIMIT - 1))
    assert log.nbytes == LIMIT * 18
    log.add(np.arange(2 * LIMIT, dtype=np.uint64), Tier.COLD, -1, 1e9)
    assert log.changes()["key"][-1] == 2 * LIMIT - 1
    assert set(log.changes()["sign"].tolist()) == {-1}
