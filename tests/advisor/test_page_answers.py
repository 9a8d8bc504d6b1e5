"""The page's answers, over a real graph that lived through something."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kvgraph.advisor.page.attention import notices
from kvgraph.advisor.page.evictions import Evictions, evictions_of
from kvgraph.advisor.page.graph import block_of, graph_of
from kvgraph.advisor.page.misses import RequestQuery, misses_of, requests_of
from kvgraph.advisor.page.now import now_of
from kvgraph.advisor.page.page import Page
from kvgraph.advisor.page.ranking import ranking_of
from kvgraph.advisor.page.sessions import session_of, sessions_of
from kvgraph.advisor.page.shadows import shadows_of
from kvgraph.advisor.page.what_if import weights_of
from kvgraph.advisor.policies.registry import POLICIES, new_policy
from kvgraph.advisor.tools.terminal import matching, why_sentence
from kvgraph.advisor.words.waits import FirstMiss, miss_remedy
from kvgraph.advisor.words.words import Departure, meanings, miss_sentence, scored
from kvgraph.dashboards.answer import mark_of
from kvgraph.graph.errors import GraphError
from kvgraph.graph.logs.reasons import REASON_NAMES, Cause, DepartureRule, Detail, Reason
from kvgraph.graph.logs.requests import LIMIT, Miss, PromptBlocks, RequestLog, RequestNames
from kvgraph.graph.ranking.policy import Rules
from kvgraph.graph.ranking.rules import RULES
from kvgraph.graph.types import EdgeType, SourceLayer, as_keys
from kvgraph.graph.wire.advice import EvictionRanking
from kvgraph.graph.wire.events import (
    HOLD_ENDS,
    BlocksAttended,
    BlocksResident,
    BlocksSpilled,
    EngineHello,
    Pressure,
    RequestFinished,
    RequestHeld,
    RequestReleased,
    RequestStarted,
    Segment,
)
from page_app import engine_status, sidecar_status
from small_world import SIZE, World, pack, page_of, page_over

CO_ATTEND = int(EdgeType.CO_ATTEND)
HELLO = EngineHello("host:a", "model", SIZE, 100, "vllm")


def newest(page: Page) -> Any:
    (request,) = requests_of(page, RequestQuery(1)).requests
    return request


def sessions_found(page: Page, limit: int = 9, **query: Any) -> list[str | None]:
    return [each.session for each in requests_of(page, RequestQuery(limit, **query)).requests]


def begin(world: World, name: str, *keys: int, found: int = 0, session: str | None = "s",
          tenant: str | None = None, waited_s: float = 0.0, engine: str = "a") -> None:  # fmt: skip
    """A request of that name begins, with four tokens behind these blocks."""
    tokens, cached = SIZE * len(keys) + 4, SIZE * found
    start = RequestStarted(
        name, pack(*keys), tokens, cached, SIZE, session, tenant, waited_s=waited_s
    )
    world.tell(start, engine=engine)


def finish(world: World, name: str, *keys: int, session: str = "s", stop: str = "stop") -> None:
    """It ends, with a token more."""
    tokens = SIZE * len(keys) + 4
    world.tell(RequestFinished(name, pack(*keys), tokens, tokens + 1, stop, session))


def test_a_request_says_what_it_found_and_why_no_more(world: World, page: Page) -> None:
    world.serve(1, 2, 3, 4)
    world.tell(BlocksSpilled(pack(3), 2, 100))
    world.evict(4, 3)
    world.serve(1, 2, 3, 4, found=2, loading=1)
    newest, first = requests_of(page, RequestQuery(10)).requests
    assert (first.miss and first.miss.reason) == "never_seen"
    counts = newest.blocks
    assert (counts.asked, counts.pool, counts.loaded, counts.computed) == (4, 2, 1, 1)
    miss = newest.miss
    assert (miss.reason, miss.index, miss.key) == ("evicted", 3, f"{4:#018x}")
    assert miss.sentence.startswith("Block 4 of 4 left the pool 1.0 s before")
    assert "session s" in miss.sentence
    assert miss.evicted_at == pytest.approx(newest.at - 1.0, abs=0.02)
    assert miss.eviction is not None
    (left,) = [e for e in evictions_of(page, 10, "a").evictions if e.id == miss.eviction]
    assert left.key == miss.key
    assert left.wanted_after_s == pytest.approx(1.0, rel=0.05)


def test_a_request_is_found_by_what_its_client_calls_it() -> None:
    names = (("chatcmpl-1-0badf00d", "s"), ("chatcmpl-12-0badf00d", "chatcmpl-1-"), ("x", "s"))
    requests = [{"request": request, "session": session} for request, session in names]
    for target, found in (
        ("chatcmpl-1", [0]), ("chatcmpl-12-0badf00d", [1]), ("s", [0, 2]), ("chatcmpl", [0, 1]),
        ("chatcmpl-1-", [1]), ("12", [1]), ("nobody", []),
    ):  # fmt: skip
        assert matching(requests, target) == [requests[place] for place in found]


def test_requests_are_paged_and_found_by_session_or_part_of_name(world: World, page: Page) -> None:
    for number in range(7):
        world.serve(number + 1, session="even-s" if number % 2 == 0 else "Odd")
    first = requests_of(page, RequestQuery(3))
    assert [each.id for each in first.requests] == [6, 5, 4]
    second = requests_of(page, RequestQuery(3, first.next))
    assert [each.id for each in second.requests] == [3, 2, 1]
    last = requests_of(page, RequestQuery(10, 1))
    assert ([each.id for each in last.requests], last.next) == ([0], None)
    odd = requests_of(page, RequestQuery(2, None, "Odd")).requests
    assert [each.id for each in odd] == [5, 3]
    assert sessions_found(page, search="ODD") == ["Odd"] * 3
    assert [each.request for each in requests_of(page, RequestQuery(9, search="r3")).requests] == [
        "r3"
    ]
    assert sessions_found(page, search="nobody") == []


def test_a_request_says_what_its_time_went_to(world: World, page: Page) -> None:
    begin(world, "r", 1, 2, waited_s=1.5)
    runs = newest(page)
    assert (runs.waited_s, runs.ended_at, runs.answer_tokens) == (1.5, None, None)
    world.now += 600  # what was answered is kept for a moment
    world.tell(RequestFinished("r", pack(1, 2), 36, 43, "stop", "s"))
    ended = newest(page)
    assert (ended.waited_s, ended.answer_tokens) == (1.5, 7)


def test_what_was_computed_again_says_what_would_have_kept_it(world: World, page: Page) -> None:
    world.serve(1, 2, 3)
    world.evict(3, 2)
    world.serve(1, 2, 3, found=1)
    request = newest(page)
    assert request.again == 2
    (remedy,) = request.remedies
    assert remedy.of == "prompt"
    assert "AITHER_KVCACHE_WARM_GIB" in remedy.text
    assert "WARM_GIB" not in request.miss.sentence, "said once"


@pytest.mark.parametrize("reason", [reason for reason in Reason if reason is not Reason.UNKNOWN])
def test_every_reason_says_what_would_have_made_it_fast(reason: Reason) -> None:
    details = {Reason.EVICTED: list(DepartureRule), Reason.COPY_LOST: list(Cause)[1:]}
    for detail in details.get(reason, list(Detail)):
        said = miss_remedy(FirstMiss(reason, int(detail), 1, 3))
        assert said[0].isupper(), said
        assert said.endswith("."), said
    evicted = FirstMiss(Reason.EVICTED, int(DepartureRule.LRU), 1, 30, 100)
    assert "A pool larger by at most 30 blocks" in str(miss_remedy(evicted))
    assert "9 times as many blocks left" in str(miss_remedy(evicted._replace(short=900)))
    assert str(miss_remedy(evicted._replace(was_there=True))).startswith("Its turn sooner: the")
    assert "or a copy: there is room for 50 blocks" in str(miss_remedy(evicted._replace(copies=50)))
    assert miss_remedy(FirstMiss(Reason.UNKNOWN, Detail.UNHEARD, 1)) is None


def test_misses_are_counted_by_reason_and_over_time(world: World, page: Page) -> None:
    world.serve(1, 2, 3)
    world.evict(3)
    world.now += 120
    world.serve(1, 2, 3, found=2)
    misses = misses_of(page)
    assert list(misses.reasons) == list(REASON_NAMES)
    assert misses.totals["never_seen"].blocks == 3
    assert misses.totals["evicted"].requests == 1
    assert len(misses.starts) == len(misses.requests["evicted"]) >= 3
    assert sum(misses.blocks["evicted"]) == 1
    assert misses.starts[-1] - misses.starts[0] == pytest.approx(60 * (len(misses.starts) - 1))
    assert misses.loss.multi_turn == 1
    assert misses.loss.capacity_multi_turn == 200 + 1  # both pools, and one block more


def test_minutes_tell_tokens_and_what_left(world: World, page: Page) -> None:
    world.serve(1, 2, 3)
    world.evict(3, 2)
    world.now += 120
    world.serve(1, 2, 3, found=1)
    world.now += 900
    world.serve(1, 2, 3, found=2, loading=1)
    misses = misses_of(page)
    steps = (misses.asked, misses.found, misses.evicted, misses.wanted)
    assert {len(each) for each in steps} == {len(misses.starts)}
    assert [sum(each) for each in steps] == [3 * 53, 16 + 48, 2, 2]
    assert sum(misses.asked_blocks) == 3 * 3
    assert (misses.asked[0], misses.asked[-1], misses.found[-1]) == (53, 53, 48)


def test_evictions_tell_what_was_known_then(world: World, page: Page) -> None:
    world.serve(1, 2, segments=(Segment(int(SourceLayer.TOOL_RESULT), 0, SIZE, 0.5),))
    made_of = {"return_time": [9000.0, 4600.0], "sharing": [0.0, 0.0], "off_chain": [0.0, 0.0]}
    world.rank(9, 1, **made_of)
    world.evict(1)
    answer = evictions_of(page, 10, None)
    (left,) = answer.evictions
    assert (left.rule, left.place, left.ranking) == ("policy", 1, 7)
    assert (left.layer, left.session, left.session_state) == ("tool_result", "s", "idle")
    assert left.importance == pytest.approx(0.5, abs=0.01)
    assert "one block was to go before it" in left.sentence
    assert left.terms == {"return_time": 4600.0, "sharing": 0.0, "off_chain": 0.0}
    assert set(answer.meanings) == set(made_of)
    assert "expected to be asked for again in about 2 min" in left.sentence
    assert answer.rules["policy"].evicted == 1
    for ask in (lambda: evictions_of(page, 10, "nobody"), lambda: shadows_of(page, "nobody")):
        with pytest.raises(GraphError, match="no engine of that id"):
            ask()


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_term_and_rule_of_a_ranking_is_explained(world: World, policy: str) -> None:
    world.graph.policy = new_policy(policy)
    world.serve(1, 2, segments=(Segment(int(SourceLayer.RULES), 0, SIZE),))
    page = page_of(world, "a")
    ranking = ranking_of(page, "a", 10)
    assert ranking.terms
    assert set(ranking.terms) <= ranking.meanings.keys()
    assert {rule.name for rule in RULES} == meanings(rule.name for rule in RULES).keys()


def test_blocks_are_shown_with_the_names_of_their_segments(world: World, page: Page) -> None:
    world.serve(1, 2, segments=(Segment(int(SourceLayer.RULES), 0, SIZE, name="house rules"),))
    graph = graph_of(page, 100)
    assert graph.names.segments == ["house rules"]
    assert graph.nodes.segment == [0, -1]


def test_the_strongest_edges_are_shown_and_the_others_counted(world: World, page: Page) -> None:
    keys = tuple(range(1, 17))
    world.serve(*keys)
    mass = np.full(16, 1 / 16, dtype="<f4").tobytes()
    for _ in range(4):
        world.tell(BlocksAttended(pack(*keys), mass))
    for _ in range(5):
        world.tell(BlocksAttended(pack(1, 2), np.full(2, 0.5, dtype="<f4").tobytes()))
    graph = graph_of(page, 100)
    links = graph.links
    assert (len(links.source), graph.left_out) == (3 * 16, 15 + 120 - 3 * 16)
    learned = [w for w, kind in zip(links.weight, links.type, strict=True) if kind == CO_ATTEND]
    assert max(learned) == pytest.approx(9.0)


def test_a_session_whose_requests_the_log_forgot_has_a_timeline(world: World, page: Page) -> None:
    world.serve(1, 2, session="old")
    for number in range(LIMIT + 1):
        world.start(10 + number % 50, session="new")
    timeline = session_of(page, "old", None)
    assert timeline.turns == []
    assert timeline.residency.pool == [2]


def test_weights_are_those_of_the_configuration_and_every_one_is_explained(page: Page) -> None:
    weights = weights_of(page)
    assert weights.score == weights.defaults
    assert set(weights.edge_types) >= {"prefix_share", "semantic"}
    assert "rules" in weights.protected_layers
    assert not weights.is_editable
    assert weights.why_not
    told = weights.score.keys() | weights.edge_types.keys()
    assert told | {"protected_share"} == weights.meanings.keys(), "a share that nobody said is none"


def test_a_rule_that_needs_copies_binds_nothing_without_them(world: World) -> None:
    world.serve(1, 2)
    tool = {"waiting_for_tool": True, "expected_return_s": 2.0}
    world.tell(RequestFinished("r", pack(1, 2), 2 * SIZE, 2 * SIZE, "stop", "s", **tool))
    assert [each.standing for each in ranking_of(page_of(world, "a"), "a", 10).order] == [[], []]
    world.tell(BlocksSpilled(pack(2), 2, 100))
    bound = ranking_of(page_of(world, "a"), "a", 10)
    assert ["due"] in [each.standing for each in bound.order]
    assert "due" in bound.meanings


def test_now_adds_up(world: World, page: Page) -> None:
    world.serve(1, 2, 3, tail=0)
    world.serve(1, 2, 3, 4, found=3, tail=2)
    now = now_of(page)
    for window in now.windows:
        assert window.asked == window.pool + window.loaded + window.prefetched + window.computed
    assert (now.windows[0].asked, now.windows[0].pool) == (7 * SIZE + 2, 3 * SIZE)
    assert sum(now.history.asked) == 7 * SIZE + 2
    assert sum(now.history.computed) == 4 * SIZE + 2
    assert "43%" in now.verdict or "42%" in now.verdict
    (pool,) = [pool for pool in now.pools if pool.engine == "a"]
    assert (pool.cached, pool.blocks, pool.states["idle"]) == (4, 99, 4)
    assert sum(pool.layers.values()) == 4


def test_the_graph_is_columns_of_one_length(world: World, page: Page) -> None:
    world.serve(1, 2, 3, session="s")
    world.serve(1, 2, 30, found=2, session="t")
    world.start(
        7, session="t", segments=(Segment(int(SourceLayer.MEMORIES), 0, SIZE, memory_id="m-1"),)
    )
    view = graph_of(page, 100)
    nodes, links, names = view.nodes, view.links, view.names
    assert {len(column) for _, column in nodes} == {5}
    assert len({len(column) for _, column in links}) == 1
    at = {key: place for place, key in enumerate(nodes.key)}
    two, three, thirty = (at[f"{key:#018x}"] for key in (2, 3, 30))
    assert (nodes.parent[three], nodes.parent[thirty]) == (two, two)
    kinds = {
        (source, target, names.types[kind])
        for source, target, kind in zip(links.source, links.target, links.type, strict=True)
    }
    assert (two, three, "temporal") in kinds
    assert (at[f"{1:#018x}"], two, "prefix_share") in kinds
    assert (at[f"{7:#018x}"], len(nodes.key), "memory_ref") in kinds
    assert names.memories == ["m-1"]
    assert names.sessions[nodes.session[thirty]] == "t"
    assert nodes.tiers[two] == 1
    assert nodes.engines[two] == 1
    only = graph_of(page, 2)
    assert len(only.nodes.key) == 2
    assert only.blocks == 5


def test_a_block_tells_its_history(world: World, page: Page) -> None:
    world.serve(1, 2, 3)
    world.evict(3)
    world.serve(1, 2, 3, found=2)
    view = block_of(page, 3)
    assert [moment.what for moment in view.history][-1] == "eviction"
    assert sorted(moment.what for moment in view.history) == ["eviction", "miss", "regret"]
    assert view.explain["id"] == view.key


def test_sessions_are_listed_and_searched(world: World, page: Page) -> None:
    world.serve(1, 2, session="alpha")
    world.serve(3, session="beta")
    assert [each.session for each in sessions_of(page, 10).sessions] == ["beta", "alpha"]
    (found,) = sessions_of(page, 10, "LPH").sessions
    assert (found.session, found.pool, found.turns, found.engine) == ("alpha", 2, 1, "a")


def test_a_session_has_a_timeline(world: World, page: Page) -> None:
    world.serve(1, 2, 3)
    world.now += 5
    world.evict(3)
    world.serve(1, 2, 3, 4, found=2)
    line = session_of(page, "s", None)
    assert [turn.found_blocks for turn in line.turns] == [0, 2]
    first, second = line.turns
    assert first.pause_s is not None
    assert first.pause_s == pytest.approx(second.at - (first.ended_at or 0.0))
    assert line.residency.pool == [3, 2, 4, 4]
    assert [moment.what for moment in line.moments].count("eviction") == 1
    assert {"turn", "pause", "miss"} <= {moment.what for moment in line.moments}
    assert line.session.pool == 4


def test_what_the_log_of_evictions_forgot_is_seen_by_what_the_next_turn_found(
    world: World, page: Page
) -> None:
    world.serve(1, 2, 3)
    world.evict(2, 3)
    world.serve(1, 2, 3, 4, found=1)
    world.history.evictions.clear()
    line = session_of(page, "s", None)
    assert line.residency.pool == [3, 1, 4, 4]
    assert line.residency.starts[1] == pytest.approx(line.turns[1].at, abs=0.01)


def test_pools_that_lose_what_is_wanted_again_are_noticed(world: World, page: Page) -> None:
    keys = range(1, 301)
    world.serve(*keys)
    status = sidecar_status(world.graph)

    def noticed() -> list[str]:
        return [each.text for each in notices(world.graph.tables, status, world.now)]

    world.evict(*keys)
    assert not any("were computed again" in text for text in noticed())
    world.serve(*keys)
    assert any("Of 300 blocks that left in the last ten minutes, 100%" in t for t in noticed())


def test_of_several_engines_the_one_that_computes_most_again_is_named(world: World) -> None:
    for engine in "ab":
        world.serve(*range(1, 301), engine=engine, session=engine)
    for _ in range(2):
        world.evict(*range(1, 301), engine="b")
        world.serve(*range(1, 301), engine="b", session="b")
    engines = (engine_status(world.graph, id, name=f"gpu-{id}", graph=None) for id in "ab")
    found = notices(world.graph.tables, sidecar_status(world.graph, *engines), world.now)
    (said,) = [each for each in found if "were computed again" in each.text]
    assert said.engine == "b"
    assert "most on gpu-b: " in said.text


def test_a_protected_block_beyond_the_share_is_ranked_as_one(world: World) -> None:
    keys = range(1, 9)
    rules = Segment(SourceLayer.RULES, 0, len(keys) * SIZE)
    world.serve(*keys, segments=(rules,))
    world.graph.configure(Rules(protected_share=0.04))  # of a pool of 100 blocks
    order = ranking_of(page_of(world, "a"), "a", 10).order
    assert [each.standing for each in order] == [["beyond_protected_share"]] * 4


def test_a_pause_is_told_with_what_was_expected(world: World, page: Page) -> None:
    for key in (1, 2):
        name = world.start(key)
        world.tell(RequestFinished(name, pack(key), 21, 21, "stop", "s", None, True, 8.0))
        world.now += 4
    (pause,) = [each for each in session_of(page, "s", None).moments if each.what == "pause"]
    assert pause.sentence == "It paused for 5.0 s; 8.0 s were expected."


def test_the_slowest_of_the_whole_log_and_of_one_reason_are_found(world: World, page: Page) -> None:
    for key, waited_s in ((1, 0.1), (2, 9.0), (3, 0.5)):
        world.serve(key, session=f"s{key}", waited_s=waited_s)
    world.start(4, session="runs")
    world.now += 30.0
    assert sessions_found(page, is_slowest=True) == ["runs", "s2", "s3", "s1"]
    assert sessions_found(page, 1, is_slowest=True) == ["runs"]
    assert requests_of(page, RequestQuery(9, is_slowest=True)).next is None
    world.serve(1, 5, found=1, session="s1")
    world.evict(5)
    world.serve(1, 5, found=1, session="s1")
    (evicted,) = requests_of(page, RequestQuery(9, reason="evicted")).requests
    assert evicted.miss.reason == "evicted"


def test_of_evictions_only_what_is_new_or_wanted_again_is_told(world: World, page: Page) -> None:
    world.serve(1, 2, 3)
    world.evict(3)
    world.evict(2)
    known = evictions_of(page, 10, "a")
    assert ids(known) == [1, 0]
    world.now += 5.0
    world.serve(1, 2, 4, found=1)
    world.evict(4)
    news = evictions_of(page, 10, "a", after=known.mark or "")
    assert (news.since, ids(news), news.next) == (1, [2, 1], None), "the second was wanted again"
    assert ids(evictions_of(page, 10, "a", after=news.mark or "")) == [1]
    again = evictions_of(page, 10, "a", after="another-1")
    assert (again.since, ids(again)) == (None, [2, 1, 0]), "a log that begins anew is told whole"


def test_the_mark_of_one_engines_log_says_nothing_of_anothers(world: World, page: Page) -> None:
    for engine in "ab":
        world.serve(1, 2, 3, engine=engine)
        world.evict(3, 2, engine=engine)
    mark = evictions_of(page, 10).mark or ""
    world.graph.forget_engine("a")
    other = evictions_of(page, 10, after=mark)
    assert (other.engine, other.since, ids(other)) == ("b", None, [1, 0])


def test_a_mark_that_no_log_came_to_yet_brings_all(world: World, page: Page) -> None:
    world.serve(1, 2, 3)
    world.evict(3, 2)
    name = world.history.evictions[0].name
    for beyond in (2, 500, 10**17, 10**40):
        answer = evictions_of(page, 10, after=mark_of(name, beyond))
        assert (answer.since, ids(answer)) == (None, [1, 0])


def ids(answer: Evictions) -> list[int]:
    return [each.id for each in answer.evictions]


def test_of_a_session_only_what_came_since_a_turn_is_told(world: World, page: Page) -> None:
    for number in range(4):
        world.serve(1, 2, 3 + number, found=min(number, 1) * 2)
        world.now += 10.0
        world.evict(3 + number)
        world.now += 10.0
    whole = session_of(page, "s", None)
    assert (whole.since, len(whole.turns)) == (None, 4)
    assert whole.mark == mark_of(world.history.requests.name, whole.turns[3].request)
    mark = mark_of(world.history.requests.name, whole.turns[2].request)
    part = session_of(page, "s", None, after=mark)
    assert part.since == whole.turns[2].request
    assert part.turns == whole.turns[2:]
    begin = whole.turns[2].at
    assert [each.what for each in part.moments] == [
        each.what for each in whole.moments if each.at >= begin
    ]
    kept = sum(start < begin for start in whole.residency.starts)
    assert part.residency.pool == whole.residency.pool[kept:]
    name = world.history.requests.name
    for unknown in (mark_of(name, 700), mark_of(name, 10**50), "another-2", "x"):
        assert session_of(page, "s", None, after=unknown).turns == whole.turns, "all is told"


@pytest.mark.parametrize("gap", [False, True])
def test_a_turn_that_runs_also_through_a_gap_is_told_again_when_its_end_is_heard_of(
    world: World, page: Page, gap: bool
) -> None:
    world.serve(1)
    slow = world.start(1, 2, found=1)
    if gap:
        world.tell(HELLO, BlocksResident(pack(1, 2)))
    world.serve(1, 3, found=1)
    first = session_of(page, "s", None)
    assert first.mark == mark_of(world.history.requests.name, 0), "the second may still change"
    world.end(slow, 1, 2)
    turns = session_of(page, "s", None, after=first.mark).turns
    assert [each.request for each in turns] == [0, 1, 2]
    assert turns[1].ended_at == turns[1].at + 4.0 + gap


def test_a_busy_session_of_another_tenants_hides_no_turn(world: World, page: Page) -> None:
    for number, tenant in [(0, "mine"), *((each, "other") for each in range(1, 600))]:
        begin(world, f"r{number}", 1, session="main", tenant=tenant)
    assert len(session_of(page, "main", "mine").turns) == 1
    assert len(session_of(page, "main", "other").turns) == 500


def test_requests_of_an_engine_that_went_do_not_run(world: World, page: Page) -> None:
    world.serve(1, waited_s=3.0)
    world.start(2, engine="b", session="dead")
    world.graph.forget_engine("b")
    world.now += 60.0
    slowest = requests_of(page, RequestQuery(9, is_slowest=True)).requests
    assert [each.session for each in slowest] == ["s", "dead"]
    assert (slowest[1].finished, slowest[1].ended_at) == ("end_not_heard", None)
    assert session_of(page, "dead", None).mark is not None, "nothing of it will change"


def test_one_that_may_outlive_a_resync_is_awaited_for_ten_minutes(world: World, page: Page) -> None:
    slow = world.start(1, 2)
    world.start(1, 3, found=1, session="gone")
    world.now += 700.0  # however long ago it began
    world.tell(HELLO, BlocksResident(pack(1, 2)))
    world.serve(1, 4, found=1)
    known = session_of(page, "s", None)
    assert known.mark is None
    slowest = requests_of(page, RequestQuery(2, is_slowest=True)).requests
    assert [each.request for each in slowest] == [slow, "r2"]
    world.now += 500.0
    world.end(slow, 1, 2)
    assert all(each.ended_at for each in session_of(page, "s", None, after="").turns)
    world.now += 200.0
    world.tell(HELLO)  # another one starts no new term
    assert session_of(page, "gone", None).mark is not None
    world.now += 1.0  # what many look at is worked out anew
    slowest = requests_of(page, RequestQuery(2, is_slowest=True)).requests
    assert [each.request for each in slowest] == [slow, "r3"]
    world.end("r2", 1, 3, session="gone")
    (gone,) = requests_of(page, RequestQuery(9, session="gone")).requests
    assert (gone.finished, gone.is_awaited) == ("end_not_heard", False)


def test_hours_are_told_in_longer_steps(world: World, page: Page) -> None:
    world.serve(1, tail=0)
    assert now_of(page).history.step_s == 10
    world.now += 3.5 * 3600
    world.serve(1, 2, found=1, tail=0)
    now = now_of(page)
    assert [window.asked for window in now.windows] == [2 * SIZE] * 3 + [3 * SIZE]
    assert (now.history.step_s, sum(now.history.asked)) == (40, 3 * SIZE)
    assert "of the prompt tokens since the first request, 3.5 h ago, were found" in now.verdict
    world.now += 600
    world.serve(1, 2, found=1, tail=0)
    assert "of the last 4 hours" in now_of(page).verdict


def test_a_session_of_several_tenants_is_asked_for_by_tenant(world: World, page: Page) -> None:
    for number, (session, tenant) in enumerate([("s", "x"), ("s", "y"), ("t", "x"), ("t", None)]):
        begin(world, f"r{number}", number + 1, session=session, tenant=tenant)
    with pytest.raises(GraphError, match="2 tenants"):
        session_of(page, "s", None)
    for number, (session, tenant) in ((1, ("s", "y")), (2, ("t", "x")), (3, ("t", None))):
        assert [each.request for each in session_of(page, session, tenant).turns] == [number]


def test_the_ranking_is_told_with_its_terms(world: World) -> None:
    world.serve(1, 2, 3)
    order, protected = as_keys([3, 2]), as_keys([1])
    empty = EvictionRanking.empty(world.now)
    ranked = replace(empty, epoch=5, order=order, protected=protected)
    page = page_over(world.graph, latest=lambda: {"a": ranked})
    view = ranking_of(page, None, 10)
    assert [block.key for block in view.order] == [f"{3:#018x}", f"{2:#018x}"]
    assert (view.epoch, view.ranked, view.protected) == (5, 2, 1)
    assert all(len(block.terms) == len(view.terms) > 0 for block in view.order)
    assert view.order[0].score == pytest.approx(sum(view.order[0].terms), abs=0.01)


def test_where_lru_rules_the_longest_unused_is_next(world: World, page: Page) -> None:
    """The order that the engine has by itself, less what it keeps back."""
    world.serve(1, 2, 3)
    unranked = ranking_of(page, "a", 10)
    assert (unranked.ranked_by, unranked.order) == ("lru", [])
    world.now += 10
    world.serve(4)
    kept = replace(EvictionRanking.empty(world.now), epoch=2, protected=as_keys([1]))
    page = page_over(world.graph, latest=lambda: {"a": kept})
    view = ranking_of(page, "a", 10)
    assert [block.key for block in view.order] == [f"{key:#018x}" for key in (3, 2, 4)]
    assert (view.ranked_by, view.ranked, view.protected, view.terms) == ("lru", 3, 1, ["age"])
    assert view.order[0].score - view.order[2].score > 10


def test_a_terminal_says_why_in_sentences(world: World, page: Page) -> None:
    world.serve(1, 2, 3)
    world.evict(3)
    name = world.serve(1, 2, 3, found=2)
    (request,) = requests_of(page, RequestQuery(1)).model_dump()["requests"]
    said = why_sentence(request)
    assert said.startswith(f"Request {name} of session s: 53 tokens, 3 blocks; 2 in the pool, 1")
    assert "Block 3 of 3 left the pool 1.0 s before" in said
    assert "What would have helped: A pool larger by one block, or host memory for" in said


def test_a_request_that_waited_says_what_was_computed_meanwhile(world: World, page: Page) -> None:
    world.serve(1, 2, 3, session="before")
    world.evict(3, 2)
    world.now += 10
    world.serve(1, 2, 3, found=1, session="largest")
    world.serve(7, engine="b")
    world.now += 1
    begin(world, "late", 9, waited_s=9.0)
    request = newest(page)
    largest = requests_of(page, RequestQuery(3)).requests[-1]
    assert (largest.session, request.wait.largest) == ("largest", largest.id)
    assert (request.wait.prompts, request.wait.again) == (1, 2 * SIZE)
    assert request.wait.tokens == largest.prompt_tokens - SIZE
    said = why_sentence(request.model_dump())
    assert "It waited 9.0 s. While it waited, the engine began one other prompt" in said
    assert "What would have helped: Keeping the 32 tokens that were computed again" in said
    assert "a pool larger by at most 2 blocks" in said
    world.now += 4
    finish(world, "late", 9)
    said = why_sentence(newest(page).model_dump())
    assert "It took 14 s, 9.0 s of it in the queue. While it waited, the engine" in said


def test_a_request_that_was_held_says_for_how_long_and_until_when(world: World, page: Page) -> None:
    world.serve(7, 8, session="before")
    world.now += 20
    world.tell(RequestHeld("r1", 3, "new", fitting=31, live=38))
    world.now += 11
    world.tell(RequestReleased("r1", 12.0, "room"))
    begin(world, "r1", 1, session="new", waited_s=12.25)
    request = newest(page)
    assert (request.waited_s, request.wait.held_s, request.wait.until) == (12.25, 12.0, "room")
    assert request.wait.sentence == (
        "It was held for 12 s, until there was room: 31 sessions fit, 38 were live when it came."
    )
    room = request.remedies[0]
    assert (room.of, room.saves_s) == ("wait", 12.0)
    assert "AITHER_KVCACHE_HOLD_MAX_S bounds" in room.text
    assert "ADMISSION=0" in room.text
    said = why_sentence(request.model_dump())
    assert "It waited 12 s. It was held for 12 s, until there was room: 31 sessions fit" in said


def test_a_request_that_queued_after_it_was_held_says_both(world: World, page: Page) -> None:
    world.tell(RequestHeld("late", 3, "new"), RequestReleased("late", 2.0, "silence"))
    world.serve(1, 2, session="largest")
    begin(world, "late", 9, session="new", waited_s=6.0)
    request = newest(page)
    assert request.wait.sentence.startswith(
        "It was held for 2.0 s, until the engine heard nothing from the sidecar. For 4.0 s it "
        "waited for its turn in the engine's queue. While it waited, the engine began one other "
        "prompt, largest's, and computed 37 tokens of it."
    )
    assert "another engine" in request.remedies[0].text, "it was not held for most of it"


@pytest.mark.parametrize("reason", [end for end in HOLD_ENDS if end != "gone"])
def test_every_end_of_a_hold_has_its_words(world: World, page: Page, reason: str) -> None:
    world.tell(RequestHeld("r", 3), RequestReleased("r", 300.0, reason))
    begin(world, "r", 9, waited_s=300.0)
    request = newest(page)
    assert request.wait.until == reason
    assert request.wait.sentence.startswith("It was held for 5 min, ")


def test_a_hold_is_its_own_engines_and_its_own_requests(world: World, page: Page) -> None:
    world.tell(RequestHeld("r", 3), RequestReleased("r", 9.0, "room"))
    world.tell(RequestHeld("gone", 3), RequestReleased("gone", 9.0, "gone"))
    for name, engine in (("r", "b"), ("gone", "a"), ("r", "a"), ("r", "a")):
        begin(world, name, 9, session=None, waited_s=9.0, engine=engine)
    waits = [each.wait for each in requests_of(page, RequestQuery(4)).requests]
    assert [wait.until if wait else "" for wait in waits] == [None, "room", None, None]


def test_a_request_that_waited_behind_one_under_way_names_it(world: World, page: Page) -> None:
    begin(world, "alone", 8, waited_s=5.0)
    wait = newest(page).wait
    assert (wait.largest, "no other prompt was computed" in wait.sentence) == (None, True)
    finish(world, "alone", 8)
    begin(world, "long", 1, 2, session="long")
    begin(world, "over", 3, session="over")
    finish(world, "over", 3, session="over")
    world.now += 10
    begin(world, "late", 9, waited_s=5.0)
    request, _, long, _ = requests_of(page, RequestQuery(4)).requests
    assert (request.wait.prompts, request.wait.largest) == (0, long.id)
    assert request.wait.sentence == (
        "When it came, long's request was under way, and still was at its turn. No other prompt "
        "was begun before its turn. Of the last one that was under way, long's, 36 tokens were "
        "computed."
    )


def test_a_request_that_waited_behind_new_prompts_goes_elsewhere(world: World, page: Page) -> None:
    for session in range(3):
        world.serve(10 * session + 1, 10 * session + 2, session=f"new {session}")
    world.now += 1
    begin(world, "late", 99, waited_s=60.0)
    request = newest(page)
    assert (request.wait.prompts, request.wait.again) == (3, 0)
    assert "another engine" in request.remedies[0].text


def test_work_ahead_is_found_where_the_log_has_begun_anew() -> None:
    log = RequestLog()
    for at in range(LIMIT + 10):
        names = RequestNames(f"r{at}", "a" if at % 2 else "b", "s", None)
        log.add(names, PromptBlocks(20, SIZE, 1, 0, 0, 0, 0, 0, 8.5), Miss(0, 1, Reason(0)), at)
    newest = log.next - 1
    assert log.ahead(newest).tolist() == [newest - 8, newest - 6, newest - 4, newest - 2]
    assert log.ahead(log.first + 3).tolist() == [log.first + 1]


def test_a_pause_ends_where_the_next_turn_arrives(world: World, page: Page) -> None:
    for name, waited_s in (("first", 0.0), ("second", 4.0)):
        begin(world, name, 1, waited_s=waited_s)
        finish(world, name, 1)
        world.now += 10
    turns = session_of(page, "s", None).turns
    assert [turn.waited_s for turn in turns] == [0.0, 4.0]
    first, second = turns
    assert first.ended_at is not None
    assert first.pause_s == pytest.approx(second.at - 4.0 - first.ended_at, abs=0.01)
    (pause,) = [each for each in session_of(page, "s", None).moments if each.what == "pause"]
    assert pause.sentence == f"It paused for {first.pause_s:.1f} s."


def test_each_window_has_its_own_sentence(world: World, page: Page) -> None:
    assert now_of(page).verdict == "No request was seen yet."
    world.serve(1, 2, 3)
    world.now += 300
    page = page_of(world)
    now = now_of(page)
    minute, ten = now.windows[:2]
    assert minute.verdict == "No request was seen in the last minute."
    since = "0% of the prompt tokens since the first request, 5 min ago, were found"
    assert ten.verdict.startswith(since)
    assert now.verdict == now.windows[-1].verdict


def test_terms_of_a_policy_of_ones_own_are_told_as_they_are() -> None:
    assert scored({}) is None
    assert scored({"age": 0.0, "importance": 0.0}) is None, "nothing stands out"
    assert scored({"age": 5.0, "hit_count": -6.0}) == (
        "the largest part of its score was its hit count"
    )
    assert scored({"return_time": 3.0}) == "the largest part of its score was its return time"


def test_a_wait_is_told_to_its_last_second(world: World, page: Page) -> None:
    """One request was under way, then another prompt was computed, and the rest went to answers."""
    world.tell(Pressure(1, 1, 1, 1, 1, 10.0))
    begin(world, "first", 1, 2, session="first")
    world.now += 5
    finish(world, "first", 1, 2, session="first")
    begin(world, "second", 3, 4, session="second")
    world.now += 10
    finish(world, "second", 3, 4, session="second")
    begin(world, "late", 9, waited_s=16.0)
    request = newest(page)
    assert request.wait.sentence == (
        "When it came, first's request was under way, for another 3.0 s. While it waited, the "
        "engine began one other prompt, second's, and computed 36 tokens of it. That takes about "
        "3.6 s; 9.4 s more went to answers."
    )
    world.now += 4
    finish(world, "late", 9)
    ended = newest(page)
    assert ended.prompt_s == 2.0
    assert [(each.of, each.saves_s) for each in ended.remedies] == [("wait", 16.0)]


def test_of_many_that_were_under_way_the_first_end_is_told(world: World, page: Page) -> None:
    for name in ("a", "b", "c"):
        begin(world, name, ord(name), session=name)
    world.now += 5
    finish(world, "b", ord("b"), session="b")
    world.now += 5
    begin(world, "late", 9, waited_s=8.0)
    assert newest(page).wait.sentence.startswith(
        "When it came, 3 requests were under way; the first of them ended after "
    )


def test_what_left_while_the_request_waited_for_its_turn_says_so(world: World, page: Page) -> None:
    world.serve(1, 2, 3)
    world.now += 10
    world.evict(3, 2)
    world.now += 4
    begin(world, "late", 1, 2, 3, found=1, waited_s=6.0)
    request = newest(page)
    assert "left the pool while the request waited for its turn: 1.0 s after it came, 5.0 s" in (
        request.miss.sentence
    )
    said = {each.of: each.text for each in request.remedies}
    assert said["prompt"].startswith("Its turn sooner: the block was there when it came. Or a pool")
    finish(world, "late", 1, stop="abort")
    begin(world, "later", 1, 2, 3, found=1, waited_s=1.0)
    assert "s before the request came" in newest(page).miss.sentence


def test_what_saves_most_is_first_and_what_saves_nothing_is_alone(world: World, page: Page) -> None:
    world.tell(Pressure(1, 1, 1, 1, 1, 10.0))
    world.serve(1, 2, 3)
    world.evict(3, 2)
    world.now += 10
    begin(world, "late", 1, 2, 3, found=1, waited_s=1.0)
    world.now += 9
    finish(world, "late", 1, 2, 3)
    request = newest(page)
    assert [each.of for each in request.remedies] == ["answer", "prompt", "wait"]
    assert request.remedies[1].saves_s == pytest.approx(3.2)
    begin(world, "new", 7, session="n", waited_s=9.0)
    world.now += 2
    finish(world, "new", 7, session="n")
    remedies = newest(page).remedies
    assert [each.of for each in remedies] == ["wait"], "no cache helps with a new prompt"
    begin(world, "calm", 8, session="c")
    assert [(each.of, each.saves_s) for each in newest(page).remedies] == [("prompt", 0.0)]


def test_a_miss_says_what_the_score_of_its_block_was_made_of() -> None:
    gone = Departure(15.0, 0.0, "it was expected to be asked for again in about 3 min")
    said = miss_sentence(Reason.EVICTED, DepartureRule.POLICY, (2, 9), gone, None, None)
    assert said == (
        "Block 3 of 9 left the pool 15 s before. Why: the policy ranked it among the first to go, "
        "as it was expected to be asked for again in about 3 min."
    )
    said = miss_sentence(Reason.EVICTED, DepartureRule.LRU, (2, 9), gone, None, None)
    assert "expected" not in said
