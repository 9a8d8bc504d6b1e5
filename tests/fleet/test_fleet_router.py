"""The router: costs in seconds, homes, and why a later turn goes elsewhere."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from kvgraph.advisor.fleet.board import EngineBoard, Speed
from kvgraph.advisor.fleet.router import (
    FleetRouter,
    Holdings,
    Homes,
    NoEngineError,
    Reason,
    RoutingRequest,
)

SPEED = Speed(
    prefill_tokens_per_s=1000.0,
    load_bytes_per_s=1e6,
    store_bytes_per_s=1e5,
    bytes_per_token=100,
    pool_tokens=10_000,
)
NOWHERE = Holdings()
LOST = np.ones(1, dtype=np.bool_)


def board_of(engines: int, speed: Speed | None = None) -> EngineBoard:
    board = EngineBoard()
    for number in range(engines):
        board.add(f"#{number}", speed)
    return board


def router_of(engines: int, speed: Speed = SPEED) -> FleetRouter:
    return FleetRouter(board_of(engines, speed), overload=2.0)


def at_home(speed: Speed = SPEED) -> tuple[FleetRouter, int]:
    """A router of two engines, and the home of its session ``s`` of 1000 tokens."""
    router = router_of(2, speed)
    first = router.route(RoutingRequest("s", 1000), NOWHERE, 0.0)
    assert first.reason is Reason.NEW
    return router, first.engine


def held(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int64)


def holding(*tokens: int, lost: np.ndarray = NOWHERE.lost) -> Holdings:
    """What engines hold of a prompt, all of it in their pools."""
    return Holdings(held(*tokens), held(*tokens), lost=lost)


def came_back(router: FleetRouter, session: str, engine: int, tokens: int) -> None:
    for now in (0.0, 1.0):
        router.homes.settle(session, engine, tokens, now)


def measure(board: EngineBoard, engine: int, seconds: float, times: int = 1) -> None:
    """Prompts of a thousand tokens took it so long."""
    for _ in range(times):
        board.measured(engine, 1000, seconds)


def test_a_cost_is_what_is_computed_loaded_fetched_and_waited_for() -> None:
    router = router_of(4)
    router.board.waiting[3] = 500
    holdings = Holdings(held(0, 400, 0, 0), held(0, 400, 600, 0), shared=800)
    costs = router.costs(RoutingRequest("s", 1000), holdings)
    # 200 tokens computed everywhere; 100 µs a token from own copies, 1 ms from the store.
    assert costs == pytest.approx([0.2 + 0.8, 0.2 + 0.4, 0.2 + 0.06 + 0.2, 0.2 + 0.8 + 0.5])


def test_a_later_turn_goes_home_though_another_engine_is_a_little_cheaper() -> None:
    router, home = at_home()
    again = router.route(RoutingRequest("s", 1500), NOWHERE, 1.0)
    assert (again.engine, again.reason) == (home, Reason.HOME)


def test_a_later_turn_yields_beyond_the_stated_overload_and_its_home_moves() -> None:
    router, home = at_home()
    router.board.waiting[home] = 10_000
    away = router.route(RoutingRequest("s", 1500), NOWHERE, 1.0)
    assert (away.engine, away.reason) == (1 - home, Reason.HOME_OVERLOADED)
    router.board.waiting[home] = 0
    assert router.route(RoutingRequest("s", 1600), NOWHERE, 2.0).engine == 1 - home
    assert router.counts == {Reason.NEW: 1, Reason.HOME_OVERLOADED: 1, Reason.HOME: 1}


@pytest.mark.parametrize(("mark", "reason"), [("up", "home_down"), ("draining", "home_drains")])
def test_a_later_turn_yields_when_its_home_takes_no_requests(mark: str, reason: str) -> None:
    router, home = at_home()
    getattr(router.board, mark)[home] = mark == "draining"
    away = router.route(RoutingRequest("s", 1000), NOWHERE, 1.0)
    assert (away.engine, away.reason) == (1 - home, reason)


def test_where_nobody_takes_requests_this_is_said() -> None:
    router = router_of(2)
    router.board.up[0], router.board.draining[1] = False, True
    with pytest.raises(NoEngineError, match="all are down, draining or refuse it"):
        router.route(RoutingRequest("s", 1000), NOWHERE, 0.0)


def test_new_sessions_go_where_live_sessions_have_the_least_kv() -> None:
    router = router_of(3)
    for engine, tokens in enumerate((3000, 1000, 2000)):
        router.homes.settle(f"at {engine}", engine, tokens, 0.0)
    assert router.route(RoutingRequest("new", 500), NOWHERE, 1.0).engine == 1


def test_a_shared_prefix_draws_a_new_session_unless_it_displaces_more() -> None:
    router = router_of(2)
    came_back(router, "live", 0, 5000)
    assert router.choose(RoutingRequest("new", 1000), holding(600, 0)).engine == 0
    came_back(router, "another", 0, 4900)
    assert router.choose(RoutingRequest("new", 1000), holding(600, 0)).engine == 1


def test_a_new_session_keeps_away_from_an_engine_whose_sessions_ask_for_much() -> None:
    router = router_of(2)
    for turn in range(6):
        found = holding(900 if turn else 200, 0)
        choice = router.route(RoutingRequest("early", 1000), found, turn)
        assert choice.engine == 0
        router.computed(choice)
    assert router.choose(RoutingRequest("new", 1000), holding(200, 0)).engine == 1
    assert router.choose(RoutingRequest("long prefix", 1000), holding(950, 0)).engine == 0


def test_what_was_asked_for_counts_half_after_as_much_as_all_pools_hold() -> None:
    board = board_of(2, SPEED)
    board.ask(0, 4000)
    for _ in range(20):
        board.ask(1, 1000)
    assert board.asked[0] == pytest.approx(2000)
    unknown = board_of(2, replace(SPEED, pool_tokens=0))
    unknown.ask(0, 4000)
    unknown.ask(1, 1000)
    assert 3900 < unknown.asked[0] < 4000


def test_sessions_that_had_one_turn_displace_as_little_as_they_come_back() -> None:
    router = router_of(2)
    for number in range(99):
        router.homes.settle(number, number % 2, 10, 0.0)
        router.homes.forget(number)
    router.homes.settle("once", 0, 9000, 0.0)
    came_back(router, "twice", 1, 1000)
    assert router.homes.return_rate == pytest.approx(2 / 102)
    assert router.homes.live() == pytest.approx([9000 * 2 / 102, 1000])
    assert router.route(RoutingRequest("new", 2000), NOWHERE, 1.0).engine == 0


@pytest.mark.parametrize(
    ("large", "found", "engine", "reason"),
    [
        (0, holding(1500, 0, lost=LOST), 0, Reason.HOME),
        (0, holding(300, 0, lost=LOST), 1, Reason.HOME_FORGOT),
        (0, holding(300, 0, lost=~LOST), 0, Reason.HOME),
        (1, holding(0, 0, lost=LOST), 0, Reason.HOME),
    ],
    ids=["little is lost", "most is lost", "it was never there", "no other engine is better"],
)
def test_a_session_whose_home_forgot_it_goes_where_it_displaces_least(
    large: int, found: Holdings, engine: int, reason: Reason
) -> None:
    router = router_of(2)
    came_back(router, "s", 0, 2000)
    came_back(router, "large", large, 9500)
    choice = router.choose(RoutingRequest("s", 2100), found)
    assert (choice.engine, choice.reason) == (engine, reason)


def test_a_session_that_its_home_forgot_displaces_nothing_of_its_own() -> None:
    router = router_of(2)
    came_back(router, "s", 0, 6000)
    came_back(router, "other", 1, 1000)
    choice = router.choose(RoutingRequest("s", 6100), holding(0, 0, lost=LOST))
    assert (choice.engine, choice.reason) == (0, Reason.HOME)


@pytest.mark.parametrize("tokens_per_s", [100.0, 10_000.0])
def test_what_overload_is_depends_on_an_engines_speed(tokens_per_s: float) -> None:
    router, home = at_home(replace(SPEED, prefill_tokens_per_s=tokens_per_s))
    kept = holding(*(1000 * (engine == home) for engine in range(2)))
    router.board.waiting[home] = 3900  # it is dearer by 2.9 prompts than the other
    assert router.choose(RoutingRequest("s", 1000), kept).reason is not Reason.HOME
    router.board.waiting[home] = 2900
    assert router.choose(RoutingRequest("s", 1000), kept).reason is Reason.HOME


def test_what_waits_is_what_an_engine_must_compute_until_it_is_done() -> None:
    router = router_of(1)
    choice = router.route(RoutingRequest("s", 1000), Holdings(held(300), held(400), 0), 0.0)
    assert router.board.waiting.tolist() == [600]
    router.computed(choice)
    assert router.board.waiting.tolist() == [0]


def test_a_context_that_shrank_costs_no_less_than_nothing() -> None:
    router = FleetRouter(board_of(2))
    home = router.route(RoutingRequest("s", 100_000), NOWHERE, 0.0).engine
    router.board.waiting[home] = 60_000
    wanted, found = RoutingRequest("s", 8_000), holding(100_000, 0)
    assert router.costs(wanted, found).min() >= 0.0
    assert router.choose(wanted, found).engine == 1 - home


def test_live_kv_counts_until_a_session_is_idle_for_long_ends_or_moves() -> None:
    router = router_of(2)
    homes, live = router.homes, router.board.live
    homes.settle("s", 0, 1000, 0.0)
    homes.settle("s", 1, 1200, 1.0)
    assert live.tolist() == [0, 1200]
    homes.settle("t", 0, 10, 602.0)
    assert live.tolist() == [10, 0]
    assert homes.of("s") is not None
    homes.settle("s", 1, 1300, 603.0)
    homes.forget("s")
    assert live.tolist() == [10, 0]
    assert homes.of("s") is None


def test_sessions_that_are_remembered_are_bounded_the_longest_idle_go_first() -> None:
    board = board_of(1)
    homes = Homes(board, most=3)
    for number in range(5):
        homes.settle(number, 0, 10, float(number))
    assert len(homes) == 3
    assert homes.of(1) is None
    assert board.live.tolist() == [30]


def test_a_refused_turn_does_not_undo_a_later_one() -> None:
    router = FleetRouter(board_of(1))
    homes = router.homes
    homes.settle("s", 0, 1_000, 0.0)
    first = homes.of("s")
    homes.settle("s", 0, 3_000, 1.0)
    homes.put_back("s", first, None)
    home = homes.of("s")
    assert home is not None
    assert (home.tokens, int(router.board.live[0]), homes.return_rate) == (3_000, 3_000, 1.0)


def test_a_measured_rate_moves_the_cost() -> None:
    router = router_of(2)
    for number in range(120):
        measure(router.board, 1, 1.0)
        if number % 6 == 0:
            measure(router.board, 0, 2.0)
    costs = router.costs(RoutingRequest("s", 1000), NOWHERE)
    assert costs.tolist() == pytest.approx([2.0, 1.0], rel=0.1)


@pytest.mark.parametrize("engines", [1, 3])
def test_a_first_prompt_that_compiled_is_soon_forgotten(engines: int) -> None:
    board = board_of(engines)
    measure(board, 0, 650.0)
    for _ in range(16):
        for number in range(engines):
            measure(board, number, 1.0)
    assert board.compute_s.tolist() == pytest.approx([0.001] * engines, rel=0.3)


def test_an_engine_that_began_slowly_gets_requests_again() -> None:
    board = board_of(2)
    router = FleetRouter(board)
    board.measured(0, 600, 20.0)
    board.measured(1, 600, 0.03)
    chosen = [router.route(RoutingRequest(n, 2_000), NOWHERE, 0.0).engine for n in range(40)]
    assert chosen.count(0) >= 4


def test_an_engine_that_joins_is_taken_to_be_as_the_others() -> None:
    board = board_of(1)
    measure(board, 0, 1.0, times=16)
    measure(board, 0, 5.0, times=16)  # under load
    board.add("b")
    assert board.compute_s.tolist() == pytest.approx([0.005, 0.005])
    measure(board, 0, 1.0, times=16)
    measure(board, 1, 650.0)  # it compiled
    assert board.compute_s[0] == pytest.approx(0.001, rel=0.5)


def test_an_engine_of_which_nothing_was_measured_is_taken_to_be_as_fast_as_the_others() -> None:
    board = board_of(3)
    measure(board, 0, 1.0)
    assert 1 / board.compute_s == pytest.approx([1000, 1000, 1000])
    for _ in range(20):
        measure(board, 1, 0.25)
        measure(board, 0, 1.0)
    fast, slow, new = board.compute_s[[1, 0, 2]]
    assert fast < new < slow


def test_load_that_slows_all_engines_makes_none_of_them_slower_than_others() -> None:
    board = board_of(2)
    for round_ in range(40):
        seconds = 1.0 if round_ < 20 else 5.0
        measure(board, 0, seconds)
        if round_ % 4 == 0:
            measure(board, 1, seconds)
    assert board.compute_s.max() / board.compute_s.min() < 1.3


def test_alike_engines_are_taken_to_be_alike_however_noisy_their_timings() -> None:
    noise = np.random.default_rng(1)
    board, apart = board_of(3), []
    for _ in range(200):
        for number in range(3):
            measure(board, number, float(noise.lognormal(0.0, 0.7)))
        apart.append(board.compute_s.max() / board.compute_s.min())
    assert np.median(apart) < 1.3
    assert max(apart) < 2.5  # single timings are apart by more than ten times


def test_engines_are_added_without_bound() -> None:
    router = router_of(200)
    assert router.board.pool.tolist() == [10_000] * 200
    assert router.route(RoutingRequest("s", 10), NOWHERE, 0.0).engine < 200


def test_a_thousand_sessions_that_are_pinned_to_one_home_spread_when_all_come_at_once() -> None:
    router = router_of(3)
    for session in range(1000):
        router.homes.settle(session, 0, 1000, 0.0)
    wanted = [RoutingRequest(session, 1000) for session in range(1000)]
    taken = [router.route(each, NOWHERE, 1.0).engine for each in wanted]
    shares = [taken.count(engine) / 1000 for engine in range(3)]
    assert max(shares) < 0.4, shares
    assert router.counts[Reason.HOME_OVERLOADED] == 1000 - router.counts[Reason.HOME]
    assert int(router.board.live.sum()) == 1_000_000, "each counts at its new home alone"
