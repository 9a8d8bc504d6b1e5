"""Shadows beside a live pool: what they say they would have found, against full replays."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from kvgraph.advisor.config.sections import ScoreConfig
from kvgraph.advisor.page.shadows import Shadows, ShadowView, lru_tokens, shadows_view
from kvgraph.advisor.page.what_if import weight_effect
from kvgraph.advisor.policies.evidence import PolicySelector
from kvgraph.advisor.policies.guard import Guard
from kvgraph.advisor.policies.lifecycle import LifecyclePolicy
from kvgraph.advisor.policies.shadow import LruShadow
from kvgraph.advisor.replay.fast import belady_hits, lru_hits
from kvgraph.advisor.replay.trace import Trace
from kvgraph.advisor.shadows import ceiling as ceiling_module
from kvgraph.advisor.shadows import runner
from kvgraph.advisor.shadows.ceiling import Ceiling, RequestWindow, ceiling
from kvgraph.advisor.shadows.pools import GuardedPool, OtherWeights
from kvgraph.advisor.shadows.runner import INTERVAL_S, LEAST, SessionSample, ShadowSet
from kvgraph.graph.compiled import core
from kvgraph.graph.logs.history import ReplayedWalk
from kvgraph.graph.ranking.formulas import ClassicPolicy
from kvgraph.graph.ranking.policy import View
from kvgraph.graph.wire.events import EngineHello, RequestStarted, TierReport
from live_shadows import Live
from made_traffic import agents, chats, made

POINT = 0.01
CAPACITY = 400
SMALL = 80  # much of the trace is lost


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return made(tmp_path_factory.mktemp("agents"), agents(np.random.default_rng(1)))


@pytest.fixture(scope="module")
def of_chats(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return made(tmp_path_factory.mktemp("chats"), chats(np.random.default_rng(2)))


@pytest.fixture(scope="module")
def played(trace: Trace) -> Live:
    """It heard all of the trace, and is looked at only."""
    live = Live(trace, CAPACITY, cpu=lambda: 0.0)
    live.play()
    return live


@pytest.fixture(scope="module")
def half(of_chats: Trace) -> Live:
    """Its policies followed half of the sessions; it is looked at only."""
    live = Live(of_chats, 2 * CAPACITY, halvings=1)
    live.play()
    return live


def view_of(live: Live) -> Shadows:
    return shadows_view(live.runner, None, live.now, float, str)


def views_of(live: Live) -> list[ShadowView]:
    return view_of(live).shadows


def rates_of(live: Live) -> dict[str, float | None]:
    return {each.name: each.hit_rate for each in views_of(live)}


@pytest.mark.parametrize(
    "capacity", [1.0, 0.75, *(pytest.param(n, marks=pytest.mark.large) for n in (1.25, 2.0))]
)
def test_a_shadow_of_lru_finds_as_a_replay_does(
    trace: Trace, played: Live, capacity: float
) -> None:
    name = "lru" if capacity == 1.0 else f"lru ×{capacity:g}"
    assert played.rate(name) == pytest.approx(lru_rate(trace, CAPACITY * capacity), abs=POINT)
    ours = played.set.ours / played.set.asked
    assert ours == pytest.approx(lru_rate(trace, CAPACITY), abs=1e-9)


def lru_rate(trace: Trace, capacity: float) -> float:
    return float(lru_hits(trace, round(capacity)).sum() / trace.full.sum())


@pytest.mark.parametrize("begins_trusted", [False, True])
def test_a_guarded_pool_of_a_bad_policy_finds_what_lru_finds(begins_trusted: bool) -> None:
    """Who asks does so twice and never again; the policy sends away what was used last."""
    keys = np.arange(4_000, dtype=np.uint64)
    uses, lru = core.RankedPools(), LruShadow(SMALL)
    alone = GuardedPool(SMALL, None, uses)
    guarded = GuardedPool(SMALL, PolicySelector(SMALL, begins_trusted), uses)
    found = dict.fromkeys(("alone", "guarded", "lru"), 0)
    for turn in range(990):
        for first in (turn, turn - 3) if turn >= 3 else (turn,):
            rows = np.arange(4 * first, 4 * first + 4, dtype=np.int32)
            by_lru = lru.found(rows, keys[rows])
            found["lru"] += by_lru
            there = uses.found(rows, keys[rows])
            found["alone"] += alone.found(there, by_lru, 4)
            found["guarded"] += guarded.found(there, by_lru, 4)
            for pool in (uses, lru):
                pool.use(rows, keys[rows])
        for pool in (alone, guarded):
            pool.rank(keys, lambda rows: rows.astype(np.float64))
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


def test_lru_follows_all_sessions_and_policies_half_of_them(of_chats: Trace, half: Live) -> None:
    assert 0 < len(half.set.sample.sessions) < len(np.unique(of_chats.session))
    assert half.set.sampled < half.set.asked
    assert half.rate("lru") == pytest.approx(lru_rate(of_chats, 2 * CAPACITY), abs=1e-9)


def test_half_of_the_sessions_say_what_a_policy_finds_for_all(of_chats: Trace, half: Live) -> None:
    """Whatever those of the sample are like: only the difference to LRU is theirs; they share a
    beginning, which takes as much room in a sample as in the pool.
    """
    all_of_them = Live(of_chats, 2 * CAPACITY)
    all_of_them.play()
    policy = half.set.ranked[0].name
    assert half.rate(policy) == pytest.approx(all_of_them.rate(policy), abs=6 * POINT)
    assert rates_of(half)[policy] == pytest.approx(half.rate(policy), abs=1e-4)


def test_belady_is_above_all_of_them(trace: Trace, played: Live) -> None:
    asked, found, ours = ceiling(played.set.window.taken(), CAPACITY)
    assert (asked, ours) == (played.set.asked, played.set.ours)
    assert found == belady_hits(trace, CAPACITY).sum()
    assert found >= max(pool.found for pool in played.set.pools if pool.capacity == 1.0)


def test_the_ceiling_starts_with_what_the_pool_had() -> None:
    window, keys = RequestWindow(), np.arange(1, 5, dtype=np.uint64)
    window.add(keys, 4, 4)
    assert ceiling(window.taken(), 10) == (4, 4, 4)
    assert ceiling(window.taken(), 2) == (4, 2, 4)
    assert ceiling([], 10) == (0, 0, 0)


def test_what_an_answer_left_is_there_for_whoever_knows_the_future() -> None:
    """Nobody asks for it, and it is no block of a prompt; but the next turn's prompt has it."""
    window, keys = RequestWindow(), np.arange(1, 7, dtype=np.uint64)
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


def test_a_sample_is_nested_and_about_its_share() -> None:
    names = [f"tenant\nsession {number}" for number in range(4000)]
    sample = SessionSample()
    assert all(map(sample.has, names))
    before = set(names)
    for share in (0.5, 0.25, 0.125):
        assert sample.halve()
        now = set(filter(sample.has, names))
        assert now < before
        assert len(now) / len(names) == pytest.approx(share, abs=0.02)
        before = now


def test_shadows_reach_the_page(played: Live) -> None:
    live, view = played, view_of(played)
    assert (live.runner.rank_every_s, live.set.sample.share) == (INTERVAL_S, 1.0), "all is done"
    names = [shadow.name for shadow in view.shadows]
    assert (names[0], names[-1], view.engine) == ("ours", "belady", "e")
    assert {"lru", "lru ×2", "classic"} <= set(names)
    steps = len(view.starts)
    assert all(len(shadow.history) == steps for shadow in view.shadows[:-1])
    tokens = lru_tokens(live.runner, live.graph.tables.history.asked(live.now), live.now)
    heard = live.graph.tables.history.tokens.last(3600.0, live.now)
    assert sum(tokens.values()) == pytest.approx(heard["pool"], rel=0.002)


@pytest.mark.parametrize(
    ("remembered", "halvings"),
    [
        (400_000, 0),
        (3_000, 1),
        pytest.param(400_000, 1, marks=pytest.mark.large),
        pytest.param(3_000, 0, marks=pytest.mark.large),
    ],
)
def test_a_ceiling_is_of_the_curves_requests_and_never_below_them(
    trace: Trace, monkeypatch: pytest.MonkeyPatch, remembered: int, halvings: int
) -> None:
    """In the first minutes, and when the first requests are forgotten."""
    monkeypatch.setattr(ceiling_module, "MOST_BLOCKS", remembered)
    live = Live(trace, SMALL, halvings)
    seen: list[list[ShadowView]] = []
    live.play(lambda: seen.append(views_of(live)))
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


def test_there_is_no_ceiling_while_other_weights_are_tried_or_nobody_looked(trace: Trace) -> None:
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
    with_tiers = [each for each in views_of(live) if each.tiers]
    assert with_tiers[0].name == "lru + tiers"
    assert {each.blocks for each in with_tiers} == {SMALL + 80}


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
    told = []
    for score in (ScoreConfig(), ScoreConfig(hit_count=50.0, age=-1.0)):
        graph, remembered = played.graph, played.runner.remembered
        effect, play = weight_effect(graph, score, None, float, remembered)
        assert effect.engine == "e"
        told.append(play())
    first, second = told
    assert 0 < first.found_now == first.found_then <= first.asked
    assert "as many blocks" in first.sentence
    assert second.found_now == first.found_now
    assert second.found_then < second.found_now
    assert "fewer" in second.sentence


def test_shadows_that_take_too_long_rank_less_often_and_then_follow_fewer(trace: Trace) -> None:
    seconds = itertools.count(0.0, 0.21)  # a tick takes more than shadows have for ten seconds
    live = Live(trace, CAPACITY, cpu=lambda: next(seconds))
    seen = []
    for _ in range(10):
        live.now += 11.0
        live.runner.tick()
        seen.append((live.runner.rank_every_s, live.set.sample.share))
    assert seen[:6] == [(INTERVAL_S * 2**n, 1.0) for n in range(2, 8)]
    assert seen[6:8] == [(64.0, 0.5), (64.0, 0.25)]


def test_a_pool_of_another_size_begins_anew(trace: Trace) -> None:
    live = Live(trace, CAPACITY)
    before = live.set
    live.graph.apply("e", [EngineHello("host", "", trace.block_size, 900, "")])
    live.runner.tick()
    assert live.set is not before
    live.graph.forget_engine("e")
    live.runner.tick()
    assert live.runner.sets == {}


def test_a_ceiling_costs_no_session_a_place(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert live.set.sample.share == 1.0


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


def test_what_dropped_sessions_walked_is_the_samples_no_longer() -> None:
    sample = SessionSample()
    rows = np.arange(20_000, dtype=np.int32)
    keys = rows.astype(np.uint64) + np.uint64(1)
    for number, part in enumerate(np.split(rows, 2_000)):
        assert sample.has(f"s{number}")
        sample.walked(f"s{number}", part, keys[part])
    seeds = rows + len(rows)
    sample.seeded(seeds, seeds.astype(np.uint64))
    for share in (0.5, 0.25):
        assert sample.halve()
        assert sample.part_of(rows, keys) == pytest.approx(share, abs=0.03)
        assert sample.part_of(seeds, seeds.astype(np.uint64)) == pytest.approx(share, abs=0.03)
    mine = next(name for name in (f"t{number}" for number in range(1_000)) if sample.has(name))
    sample.walked(mine, rows[:10_000], keys[:10_000])
    assert sample.part_of(rows[:10_000], keys[:10_000]) == 1.0
    assert sample.part_of(rows[:10_000], keys[:10_000] + np.uint64(1)) == 0.0
    unknown = rows + 10 * len(rows)
    assert sample.part_of(unknown, keys) == 0.0


def test_a_block_that_a_session_of_the_smaller_sample_walked_too_stays_the_samples() -> None:
    sample = SessionSample()
    names = [f"s{number}" for number in range(100)]
    half = SessionSample()
    half.halve()
    stays, goes = (next(name for name in names if half.has(name) is kept) for kept in (True, False))
    rows = np.arange(10, dtype=np.int32)
    keys = rows.astype(np.uint64) + np.uint64(1)
    for first, second in ((stays, goes), (goes, stays)):
        sample.walked(first, rows, keys)
        sample.walked(second, rows, keys)
        keys = keys + np.uint64(100)
    sample.walked(stays, rows + 10, keys)
    sample.walked(goes, rows + 10, keys)
    sample.walked(goes, rows + 20, keys)
    assert sample.halve()
    assert sample.part_of(rows, keys - np.uint64(100)) == 1.0
    assert sample.part_of(rows + 10, keys) == 1.0
    assert sample.part_of(rows + 20, keys) == 0.0


def test_the_ceiling_is_of_all_sessions_whatever_the_sample(trace: Trace) -> None:
    live = Live(trace, CAPACITY, halvings=1)
    live.set.window.add(np.arange(5, dtype=np.uint64), 5, 0)
    live.runner.tick()
    assert live.set.sample.share == 0.5
    live.set.window.add(np.arange(5, dtype=np.uint64), 5, 5)
    assert ceiling(*live.runner.remembered("e")) == (10, 5, 5)


def rankings_of(live: Live) -> list[float]:
    """When its set is to rank, which it then does not."""
    ranked = list[float]()

    def ranking(view: View) -> Iterator[None]:
        ranked.append(live.now)
        yield

    live.set.ranking = ranking  # type: ignore[method-assign]
    return ranked


def test_shadows_that_can_follow_no_fewer_rank_less_often(
    trace: Trace, caplog: pytest.LogCaptureFixture
) -> None:
    seconds = itertools.chain([0.0, 0.1], itertools.count(50.0, 50.0))
    halvings = round(-math.log2(LEAST))
    live = Live(trace, CAPACITY, halvings, cpu=lambda: next(seconds))
    with caplog.at_level("INFO"):
        for _ in range(20):
            live.now += 31.0
            live.runner.tick()
    assert [record.args for record in caplog.records] == [(0.5 * 2**n,) for n in range(1, 8)]
    ranked = rankings_of(live)
    for _ in range(1280):
        live.now += INTERVAL_S
        live.ask()
        live.runner.tick()
    assert len(ranked) == pytest.approx(10, abs=1)


def test_shadows_rest_while_nothing_is_asked(trace: Trace) -> None:
    live = Live(trace, CAPACITY)
    ranked = rankings_of(live)
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
    assert not live.set.sampled
    first = {each.name: each for each in views_of(live)}
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
