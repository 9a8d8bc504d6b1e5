"""Shadows beside a live pool: what they say they would have found, against full replays."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kvgraph.advisor.config.sections import ScoreConfig
from kvgraph.advisor.page.shadows import ShadowView, lru_tokens, shadows_view
from kvgraph.advisor.page.what_if import weight_effect
from kvgraph.advisor.policies.evidence import PolicySelector
from kvgraph.advisor.policies.guard import Guard
from kvgraph.advisor.policies.lifecycle import LifecyclePolicy
from kvgraph.advisor.replay.fast import belady_hits, lru_hits
from kvgraph.advisor.replay.trace import Trace
from kvgraph.advisor.shadows import ceiling as ceiling_module
from kvgraph.advisor.shadows import runner
from kvgraph.advisor.shadows.ceiling import Ceiling, RequestWindow, ceiling
from kvgraph.advisor.shadows.pools import LruPool, OtherWeights, PolicyPool
from kvgraph.advisor.shadows.runner import INTERVAL_S, ShadowSet
from kvgraph.graph.compiled import core
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.logs.history import ReplayedWalk
from kvgraph.graph.ranking.formulas import ClassicPolicy
from kvgraph.graph.ranking.policy import View
from kvgraph.graph.wire.events import EngineHello, RequestStarted, TierReport
from live_shadows import Live
from made_traffic import agents, made
from turns import SIZE, resident, turn_events

POINT = 0.01
CAPACITY = 400
SMALL = 80  # much of the trace is lost


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return made(tmp_path_factory.mktemp("agents"), agents(np.random.default_rng(1)))


@pytest.fixture(scope="module")
def played(trace: Trace) -> Live:
    """It heard all of the trace, and is looked at only."""
    live = Live(trace, CAPACITY, cpu=lambda: 0.0)
    live.play()
    return live


@pytest.mark.parametrize(
    "capacity", [1.0, 0.75, *(pytest.param(n, marks=pytest.mark.large) for n in (1.25, 2.0))]
)
def test_a_shadow_of_lru_finds_what_a_full_replay_finds(
    trace: Trace, played: Live, capacity: float
) -> None:
    live = played
    name = "lru" if capacity == 1.0 else f"lru ×{capacity:g}"
    full = lru_hits(trace, round(CAPACITY * capacity)).sum() / trace.full.sum()
    assert live.rate(name) == pytest.approx(full, abs=POINT)
    assert live.set.ours / live.set.asked == pytest.approx(
        lru_hits(trace, CAPACITY).sum() / trace.full.sum(), abs=1e-9
    )


@pytest.mark.parametrize("begins_trusted", [False, True])
def test_a_guarded_pool_of_a_bad_policy_finds_what_lru_finds(begins_trusted: bool) -> None:
    """Who asks does so twice and never again; the policy sends away what was used last."""
    keys = np.arange(4_000, dtype=np.uint64)
    uses, lru = core.RankedPools(), core.LruStack([SMALL])
    beside = LruPool("lru", 1.0, SMALL)

    def scores(view: Any, picked: Any) -> Any:
        return picked.rows.astype(np.float64)

    alone = PolicyPool("alone", "bad", scores, beside, None, uses)
    selector = PolicySelector(SMALL, begins_trusted)
    guarded = PolicyPool("guarded", "bad", scores, beside, selector, uses)
    view: Any = SimpleNamespace(blocks=SimpleNamespace(keys=keys, size=len(keys)))
    found = dict.fromkeys(("alone", "guarded", "lru"), 0)
    for turn in range(990):
        for first in (turn, turn - 3) if turn >= 3 else (turn,):
            rows = np.arange(4 * first, 4 * first + 4, dtype=np.int32)
            (by_lru,) = lru.found(rows, keys[rows])
            found["lru"] += by_lru
            there = uses.found(rows, keys[rows])
            found["alone"] += alone.finds(there, by_lru, 4)
            found["guarded"] += guarded.finds(there, by_lru, 4)
            for pool in (uses, lru):
                pool.use(rows, keys[rows])
        for pool in (alone, guarded):
            pool.rank(view)
    assert found["alone"] < 0.1 * found["lru"]
    assert found["guarded"] > 0.95 * found["lru"]


def test_the_page_says_which_shadows_are_guarded(trace: Trace) -> None:
    guarded = Live(trace, SMALL, referee=Guard(ClassicPolicy.name))
    said = {each.name: each.sentence for each in views_of(guarded)}
    assert "guarded as ours is, in a pool twice as large" in said["classic ×2"]
    assert "guarded as ours is, in a pool as large, with host" in said["classic + host memory"]
    assert "guarded" not in said["lru ×2"]
    assert not any("guarded" in each.sentence for each in views_of(Live(trace, SMALL)))


def test_a_guarded_shadow_of_a_good_policy_finds_what_the_policy_finds(trace: Trace) -> None:
    alone = Live(trace, SMALL, policy=LifecyclePolicy())
    guarded = Live(trace, SMALL, policy=LifecyclePolicy(), referee=Guard(LifecyclePolicy.name))
    for live in (alone, guarded):
        live.play()
    assert alone.rate("lifecycle") > guarded.rate("lru") + 5 * POINT
    assert guarded.rate("lifecycle") >= alone.rate("lifecycle") - POINT


def views_of(live: Live) -> list[ShadowView]:
    return shadows_view(live.runner, None, live.now, float, str).shadows


def test_belady_is_above_all_of_them(trace: Trace, played: Live) -> None:
    asked, found, ours = ceiling(played.set.window.taken(), CAPACITY)
    assert (asked, ours) == (played.set.asked, played.set.ours)
    assert found == belady_hits(trace, CAPACITY).sum()
    assert found >= max(pool.found for pool in played.set.pools if pool.capacity == 1.0)


def test_an_engine_that_lru_ranks_finds_what_lru_finds_in_a_pool_listed_in_no_order() -> None:
    graph = KVCacheGraph()
    watching = runner.ShadowRunner(graph, time.monotonic, always=True)
    hello = EngineHello("e", "m", SIZE, 41, "")
    graph.apply("e", [hello, resident(*range(1, 31), *range(101, 111))])
    watching.tick()
    graph.apply("e", turn_events(None, *range(201, 211), more=1, request="new"))
    graph.apply("e", turn_events(None, *range(101, 111), found=10, more=1, request="listed last"))
    watching.tick()
    lru, smaller, *_ = watching.sets["e"].lru
    assert watching.sets["e"].ours == lru.found == 10
    assert smaller.found < 10, "nobody knows of it"


def test_the_ceiling_starts_with_what_the_pool_had() -> None:
    window = RequestWindow()
    keys = np.arange(1, 5, dtype=np.uint64)
    window.add(keys, 4, 4)
    assert ceiling(window.taken(), 10) == (4, 4, 4)
    assert ceiling(window.taken(), 2) == (4, 2, 4)
    assert ceiling([], 10) == (0, 0, 0)


def test_what_an_answer_left_is_there_for_whoever_knows_the_future() -> None:
    """Nobody asks for it, and it is no block of a prompt; but the next turn's prompt has it."""
    keys = np.arange(1, 7, dtype=np.uint64)
    window = RequestWindow()
    window.add(keys[:4], 4, 0)
    window.answered(keys[4:])
    window.add(keys, 6, 6)
    assert ceiling(window.taken(), 10) == (10, 6, 6)


def test_the_ceiling_is_above_lru_where_turns_come_back_with_their_answers() -> None:
    shadows = ShadowSet(16, [ClassicPolicy()])
    rows = np.arange(12, dtype=np.int32)
    keys = rows.astype(np.uint64) + 1
    for turn in range(3):
        asked, left = 4 * turn + 2, 4 * turn + 4
        for blocks, reach, found in ((asked, asked, 0), (left, asked, -1)):
            shadows.hear(
                ReplayedWalk(0, "s", rows[:blocks], keys[:blocks], reach, found, 0, 1.0 + turn)
            )
    asked, belady, _ = ceiling(*shadows.remembered())
    assert asked == shadows.asked == 2 + 6 + 10
    assert belady >= shadows.lru[0].found == 4 + 8


def test_shadows_reach_the_page(played: Live) -> None:
    live = played
    view = shadows_view(live.runner, None, live.now, lambda at: round(at + 1e9, 3), str)
    names = [shadow.name for shadow in view.shadows]
    assert (names[0], names[-1], view.engine) == ("ours", "belady", "e")
    assert {"lru", "lru ×2", "classic"} <= set(names)
    steps = len(view.starts)
    assert all(len(shadow.history) == steps for shadow in view.shadows[:-1])
    tokens = lru_tokens(live.runner, live.graph.tables.history.asked(live.now), live.now)
    heard = live.graph.tables.history.tokens.last(3600.0, live.now)
    assert sum(tokens.values()) == pytest.approx(heard["pool"], rel=0.002)


@pytest.mark.parametrize("remembered", [400_000, 3_000])
def test_a_ceiling_is_of_the_curves_requests_and_never_below_them(
    trace: Trace, monkeypatch: pytest.MonkeyPatch, remembered: int
) -> None:
    """In the first minutes, and when the first requests are forgotten."""
    monkeypatch.setattr(ceiling_module, "MOST_BLOCKS", remembered)
    live = Live(trace, SMALL)
    seen: list[list[ShadowView]] = []

    def look() -> None:
        seen.append(shadows_view(live.runner, None, live.now, float, str).shadows)

    live.play(look)
    shown = 0
    for ours, *others, top in seen:
        assert (ours.name, top.name) == ("ours", "belady")
        if top.hit_rate is None:
            continue
        shown += 1
        alike = [each for each in others if each.capacity <= 1.0]
        assert len(alike) >= 4
        assert all((each.hit_rate or 0.0) <= top.hit_rate for each in (ours, *alike))
        assert {each.ours for each in (ours, *others)} == {top.ours}
        assert {each.asked for each in others if each.policy == "lru"} == {top.asked}
        assert ours.asked == top.asked
    assert shown > len(seen) / 2
    assert len({views[-1].asked for views in seen}) > 2, "it is worked out again"


def test_there_is_no_ceiling_while_other_weights_are_tried_or_when_nobody_looked(
    trace: Trace,
) -> None:
    live = Live(trace, SMALL)
    live.play(live.runner.looked)
    assert views_of(live)[-1].hit_rate is not None
    live.runner.weigh_otherwise(OtherWeights(ClassicPolicy(), None, live.graph.rules, "none"))
    assert views_of(live)[-1].hit_rate is None
    live.runner.weigh_alike()
    assert views_of(live)[-1].hit_rate is not None
    assert live.set.is_bounded
    live.now += 130.0
    live.runner.tick()
    assert not live.set.is_bounded
    assert views_of(live)[-1].hit_rate is None


def test_tiers_are_as_much_more_pool(trace: Trace) -> None:
    live = Live(trace, SMALL)
    report = dict.fromkeys(TierReport.__struct_fields__, 0)
    live.graph.apply("e", [TierReport(**{**report, "warm_capacity": 60, "cold_capacity": 20})])
    live.runner.tick()
    live.play()
    pools = {pool.name: pool for pool in live.set.lru}
    full = lru_hits(trace, SMALL + 80).sum()
    assert pools["lru + tiers"].found == pytest.approx(full, abs=POINT * live.set.asked)
    assert pools["lru + tiers"].found > pools["lru"].found
    view = shadows_view(live.runner, None, live.now, float, str)
    assert next(s.name for s in view.shadows if s.tiers) == "lru + tiers"
    assert all(s.blocks == SMALL + 80 for s in view.shadows if s.tiers)


def test_what_is_asked_before_tiers_are_known_is_no_find_of_lrus(trace: Trace) -> None:
    """An engine reports its tiers with its first steps, which makes its shadows begin anew."""
    live = Live(trace, CAPACITY)
    report = dict.fromkeys(TierReport.__struct_fields__, 0)
    live.now = 1.0
    live.ask()
    live.graph.apply("e", [TierReport(**{**report, "warm_capacity": 60})])
    live.ask(hit=1)  # by now all of it is there
    live.runner.tick()
    once = live.set.asked // 2 - 1  # its last block is computed in any case
    assert once > 1
    assert [each.found for each in live.set.lru] == [once] * len(live.set.lru)


def test_what_host_memory_would_bring_is_told_of_an_engine_without_tiers(played: Live) -> None:
    shadows = {each.name: each for each in views_of(played)}
    with_memory, twice = shadows["lru + host memory"], shadows["lru ×2"]
    assert (with_memory.found, with_memory.tiers, twice.tiers) == (twice.found, True, False)


def test_what_a_load_brought_is_ours(trace: Trace) -> None:
    live = Live(trace, CAPACITY)
    keys = np.arange(1, 5, dtype="<u8").tobytes()
    live.runner.tick()
    started = RequestStarted("r", keys, 70, 16, 16, "s", loading_tokens=32)
    live.graph.apply("e", [started])
    live.runner.tick()
    assert live.set.ours == 3


def test_a_change_of_weights_is_played_on_the_remembered_requests(played: Live) -> None:
    same, nonsense = ScoreConfig(), ScoreConfig(hit_count=50.0, age=-1.0)
    told = {}
    for name, score in (("same", same), ("nonsense", nonsense)):
        graph, remembered = played.graph, played.runner.remembered
        effect, play = weight_effect(graph, score, None, float, remembered)
        assert effect.engine == "e"
        told[name] = play()
    first, second = told["same"], told["nonsense"]
    assert 0 < first.found_now == first.found_then <= first.asked
    assert "as many blocks" in first.sentence
    assert second.found_now == first.found_now
    assert second.found_then < second.found_now
    assert "fewer" in second.sentence


def test_shadows_that_take_too_long_rank_less_often(
    trace: Trace, caplog: pytest.LogCaptureFixture
) -> None:
    seconds = itertools.chain([0.0, 0.1], itertools.count(50.0, 50.0))  # more than they have
    live = Live(trace, CAPACITY, cpu=lambda: next(seconds))
    with caplog.at_level("INFO"):
        for _ in range(20):
            live.now += 31.0
            live.runner.tick()
    assert [record.args for record in caplog.records] == [(0.5 * 2**n,) for n in range(1, 12)]
    ranked: list[float] = []
    live.set.ranking = noted(live, ranked)  # type: ignore[method-assign]
    for _ in range(512):
        live.now += 10.0
        live.ask()
        live.runner.tick()
    assert len(ranked) == pytest.approx(5, abs=1)


def test_shadows_that_take_little_do_all(played: Live) -> None:
    assert played.runner.rank_every_s == INTERVAL_S


def test_a_pool_of_another_size_begins_anew(trace: Trace) -> None:
    live = Live(trace, CAPACITY)
    before = live.set
    live.graph.apply("e", [EngineHello("host", "", trace.block_size, 900, "")])
    live.runner.tick()
    assert live.set is not before
    live.graph.forget_engine("e")
    live.runner.tick()
    assert live.runner.sets == {}


def test_a_ceiling_makes_no_ranking_rarer(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a share of a core of its own, and is worked out only while somebody looks."""
    spent_s = [0.0]

    def slow(window: Sequence[Any], capacity: int) -> Ceiling:
        spent_s[0] += 4.0
        return ceiling(window, capacity)

    monkeypatch.setattr(runner, "ceiling", slow)
    live = Live(trace, CAPACITY, cpu=lambda: spent_s[0])
    live.set.window.add(np.arange(5, dtype=np.uint64), 5, 0)
    for _ in range(24):
        live.runner.looked()
        live.now += 10.0
        live.runner.tick()
    assert spent_s[0] >= 4.0
    assert live.set.belady == (5, 0, 0)
    assert live.runner.rank_every_s == INTERVAL_S


def test_ceilings_that_take_long_are_worked_out_less_often(trace: Trace) -> None:
    seconds = itertools.count(0.0, 4.0)  # so a ceiling takes four: it has a sixtieth of a core
    live = Live(trace, CAPACITY, cpu=lambda: next(seconds))
    found = []
    for at in (0.0, 61.0, 239.0, 241.0):
        live.now = at
        live.runner.looked()
        live.set.window.add(np.arange(5 + int(at), dtype=np.uint64), 5, 0)
        live.runner.tick()
        found.append(live.set.belady)
    assert found == [(5, 0, 0), (5, 0, 0), (5, 0, 0), (561, 15, 0)]


def noted(live: Live, ranked: list[float]) -> Callable[[View], Iterator[None]]:
    """Ranks nothing, and notes when it was to."""

    def ranking(view: View) -> Iterator[None]:
        ranked.append(live.now)
        yield

    return ranking


def test_shadows_rest_while_nothing_is_asked(trace: Trace) -> None:
    live = Live(trace, CAPACITY)
    ranked: list[float] = []
    live.set.ranking = noted(live, ranked)  # type: ignore[method-assign]
    for tick in range(20):
        live.now += INTERVAL_S
        if tick == 10:
            live.ask()
        live.runner.tick()
    assert len(ranked) == 1


def test_policies_shadows_follow_only_while_somebody_looks(trace: Trace, played: Live) -> None:
    """LRU's always do: they rank nothing. Whoever looks is told of what policies found since."""
    live = Live(trace, CAPACITY, always=False)
    live.play()
    policy = live.set.ranked[0]
    assert live.set.lru[0].found == played.set.lru[0].found > 0
    assert live.set.rate(policy) is None
    first = {
        each.name: each for each in shadows_view(live.runner, None, live.now, float, str).shadows
    }
    assert first[policy.name].hit_rate is None
    assert first["lru"].hit_rate is not None
    assert set(first[policy.name].history) == {None}
    live.runner.tick()  # it is looked at: they hold what the pool does, and follow
    asked = live.set.asked
    live.ask()
    live.runner.tick()
    (policy,) = [each for each in live.set.ranked if each.name == policy.name]
    assert live.set.heard_by(policy).asked == live.set.asked - asked > 0
    assert live.set.rate(policy) is not None
    assert len(live.set.window.since_begun()) < len(live.set.window.taken())
    live.now += 700.0
    live.runner.tick()
    assert not live.set.awake
    assert live.set.rate(live.set.ranked[0]) is None
