"""The closed loop: users wait for answers, engines collapse, and holding new sessions helps."""

from __future__ import annotations

import itertools
import json
from array import array
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
from command_line import kvgraph
from kvgraph.advisor.admission import Admission
from kvgraph.advisor.policies.registry import DEFAULT, new_policy
from kvgraph.advisor.replay.closed import (
    MAX_PAUSE_S,
    ArrivedRequest,
    Loop,
    Played,
    Queue,
    Runs,
    SimulatedHold,
    play,
    runs_for,
)
from kvgraph.advisor.replay.closed_arms import (
    Arm,
    ClosedCell,
    ClosedPlan,
    SessionPart,
    closed_rows,
    draw_cliff,
    part_of,
    run_cell,
)
from kvgraph.advisor.replay.graph_order import GraphOrder
from kvgraph.advisor.replay.recorded_sessions import RecordedTurn, Session
from kvgraph.advisor.replay.simulator import HostTier, Instance, LruOrder
from kvgraph.advisor.replay.trace import ReplayError, ServiceModel
from kvgraph.graph.admission import HoldingBounds
from kvgraph.graph.wire.advice import AdmissionAdvice

BLOCK = 512
SERVICE = ServiceModel(prefill_tokens_per_s=4096.0, decode_s_per_token=0.01)


def session(name: str, turns: int = 12, blocks: int = 8, pause_s: float = 6.0) -> Session:
    """Grows by a block a turn, from ``blocks``; nothing of it is shared."""
    made = []
    at = 0.0
    for index in range(turns):
        tokens = (blocks + index) * BLOCK
        stop = "end_turn" if index + 1 == turns else "tool_use"
        made.append(RecordedTurn(at, tokens, 50, array("I", range(blocks + index)), stop, (), 2.0))
        at += 2.0 + pause_s
    return Session(name, BLOCK, 0, 0, 0.0, tuple(made), ())


def fleet(count: int = 30) -> list[Session]:
    return [session(f"s{i:02}", 10 + i % 5, pause_s=4.0 + i % 7) for i in range(count)]


def loop(users: int, seconds: float = 700.0, **more: float) -> Loop:
    facts = {"begin_s": 60.0, "warm_s": 250.0, **more}
    return Loop(users, seconds, service=SERVICE, **facts)  # type: ignore[arg-type]


@cache
def runs(users: int, seconds: float = 700.0) -> Runs:
    return runs_for(fleet(), users, seconds, block_size=BLOCK, seed=1)


@cache
def lru(users: int, capacity: int) -> Played:
    return play(runs(users), Instance(capacity, LruOrder()), loop(users))


@cache
def held(users: int, capacity: int, policy: str = "lru") -> Played:
    found = runs(users)
    order = GraphOrder.alone(found.trace, new_policy(policy, None), hints=True)
    word = partial(order.advised, Admission())
    return play(found, Instance(capacity, order), loop(users), word=word)


def turns(played: Played) -> int:
    return int((played.done >= 250.0).sum())


def computed(played: Played) -> float:
    done = played.done >= 250.0
    return 1.0 - float(played.found[done].sum() / played.prompt[done].sum())


def test_a_turn_comes_after_the_answer_and_the_pause() -> None:
    found = runs(4)
    played = play(found, Instance(5000, LruOrder()), loop(4))
    came = np.flatnonzero(~np.isnan(played.at))
    for request in came[~played.opens[came]].tolist():
        waited = played.at[request] - played.done[request - 1]
        assert waited == pytest.approx(found.pause[request])
    assert (played.first_token[came] >= played.started[came])[played.done[came] > 0].all()


def test_a_user_plays_one_session_after_the_other_and_no_two_the_same() -> None:
    found = runs(3)
    played = play(found, Instance(5000, LruOrder()), loop(3))
    over = np.flatnonzero(~np.isnan(played.ended))
    assert len(over) > 6
    begun = np.flatnonzero(~np.isnan(played.at[found.first[:-1]]))
    assert len(begun) <= len(over) + 3
    assert begun.tolist() == list(range(len(begun)))


def test_prompts_are_computed_one_after_the_other() -> None:
    played = lru(20, 60)
    done = np.flatnonzero(~np.isnan(played.first_token))
    order = done[np.argsort(played.started[done], kind="stable")]
    least = (played.prompt - played.found)[order][1:] * BLOCK / SERVICE.prefill_tokens_per_s
    assert (np.diff(played.first_token[order]) >= least - 1.0).all()


def test_pauses_are_cut_and_subagents_left_out() -> None:
    lunch = session("lunch", turns=2, pause_s=9000.0)
    found = runs_for([lunch], 1, 100.0, block_size=BLOCK, seed=1)
    assert found.pause.max() == MAX_PAUSE_S
    assert len(found.trace) == 2 * len(found)


def test_the_same_seed_gives_the_same_loop() -> None:
    one, two = held(6, 100), held.__wrapped__(6, 100)
    assert np.array_equal(one.done, two.done, equal_nan=True)


def test_past_the_cliff_lru_computes_nearly_everything_again() -> None:
    calm, over = lru(6, 100), lru(24, 100)
    assert computed(calm) < 0.25
    assert computed(over) > 0.6
    assert turns(over) < turns(calm)


@pytest.mark.parametrize("policy", ["lru", DEFAULT])
def test_holding_new_and_cold_sessions_keeps_an_engine_out_of_it(policy: str) -> None:
    over, kept = lru(24, 100), held(24, 100, policy)
    assert turns(kept) > 1.5 * turns(over)
    assert computed(kept) < 0.75 * computed(over)
    assert (kept.held_s > 0).any()
    assert kept.held_s.max() <= 301.0


def test_below_the_cliff_nobody_is_held_and_nothing_changes() -> None:
    plain, advised = lru(6, 100), held(6, 100)
    assert not (advised.held_s > 0).any()
    assert np.array_equal(plain.done, advised.done, equal_nan=True)


def test_copies_in_host_memory_are_loaded_and_not_computed() -> None:
    bare = lru(24, 100)
    tiered = play(runs(24), Instance(100, LruOrder(), host=HostTier(2000)), loop(24))
    assert computed(tiered) < 0.3 < computed(bare)
    assert turns(tiered) > turns(bare)


def test_longest_prefix_first_takes_the_resident_before_the_cold() -> None:
    longest = replace(loop(24), queue=Queue.LPM)
    assert turns(play(runs(24), Instance(100, LruOrder()), longest)) > turns(lru(24, 100))


def test_a_request_larger_than_the_pool_is_refused_and_its_user_goes_on() -> None:
    sessions = [session("big", 3, 40), session("small", 3)]
    found = runs_for(sessions, 1, 300.0, block_size=BLOCK, seed=1)
    played = play(found, Instance(20, LruOrder()), loop(1, 300.0))
    assert played.refused > 0
    assert (~np.isnan(played.first_token)).any()


def test_a_refusal_is_no_turn_and_stands_in_the_row() -> None:
    plan = ClosedPlan([session("big", 3, 40)], loop(1, 700.0))
    row = run_cell(plan, ClosedCell("lru", 20, 2))
    assert row.refused > 0
    assert row.turns_per_hour == 0.0


def advice(room: int | None, known_of: float = 0.0) -> AdmissionAdvice:
    return AdmissionAdvice(1, 0.0, room, 2, 1, known_of)


NUMBERS = itertools.count()


def hold(word: Callable[[float], AdmissionAdvice | None]) -> SimulatedHold:
    return SimulatedHold(word, HoldingBounds(1000, 100.0))


def asked(*, opens: bool = True, brings: int = 10) -> ArrivedRequest:
    return ArrivedRequest(next(NUMBERS), 0, 0, opens, brings)


def test_a_request_is_asked_about_when_it_comes_and_when_its_turn_comes() -> None:
    room = 25
    held = hold(lambda now: advice(room))
    for _ in range(100):
        assert not held.arrives(asked(brings=0), 0.0, idle=False, queued=True)
        held.released(0.0, idle=False, free=False)
    early, warm, late = asked(), asked(opens=False, brings=0), asked(opens=False)
    assert not held.arrives(early, 1.0, idle=False, queued=True)
    assert not held.arrives(warm, 1.0, idle=False, queued=True)
    assert not held.arrives(asked(), 1.5, idle=False, queued=True)
    assert held.arrives(late, 2.0, idle=False, queued=True), "what was let in is off the room"
    assert not held.turn_comes(early, 60.0), "room was taken for it"
    warm.brings = 10
    assert held.turn_comes(warm, 60.0), "its context was lost in the line"
    assert held.still_held() == [late, warm]
    room = 100
    assert held.released(61.0, idle=False, free=False) == [late, warm]
    assert (late.held_s, warm.held_s) == (59.0, 1.0)


def test_without_a_word_nobody_is_held() -> None:
    held = hold(lambda now: None)
    assert not held.arrives(asked(), 1.0, idle=False, queued=True)
    assert not held.turn_comes(asked(), 1.0)
    assert held.released(2.0, idle=False, free=True) == []


def test_rows_are_what_the_loops_gave(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plan = ClosedPlan(fleet(), loop(1), seed=1)
    cells = [ClosedCell(arm, 100, 24) for arm in ("lru", "lpm", "lru+admission")]
    rows = closed_rows(plan, cells)
    assert [(row.arm, row.users) for row in rows] == [(c.arm, c.users) for c in cells]
    assert rows[0] == run_cell(plan, cells[0])
    assert rows[2].turns_per_hour > 1.5 * rows[0].turns_per_hour
    assert 0.0 < rows[2].longest_hold <= 301.0
    assert rows[1].held == rows[0].held == 0.0
    draw_cliff(rows, tmp_path / "cliff.png")
    assert (tmp_path / "cliff.png").stat().st_size > 10_000


def test_an_arm_is_its_parts_in_order() -> None:
    assert Arm.of("default+hints+host+admission") == Arm("default", True, True, True)
    assert Arm.of("lru+host") == Arm("lru", False, True, False)
    assert Arm.of("lpm+host+admission") == Arm("lpm", False, True, True)
    assert [Arm.of(name).is_stock for name in ("lru", "lpm+host", "lru+admission")] == [
        True, True, False,
    ]  # fmt: skip
    for bad in ("arc", "lpm+hints", "default+admission+host", "lru+host+hints", "+admission"):
        with pytest.raises(ReplayError, match="allowed"):
            Arm.of(bad)


@pytest.mark.large
def test_copies_are_no_regret_and_what_host_memory_lost_is() -> None:
    """A pool and its host memory that hold everybody hold nobody back; too small ones do."""
    plan = ClosedPlan(fleet(), loop(1), host=4.0)
    copied, bare = (ClosedCell(arm, 100, 24) for arm in ("lru+host+admission", "lru+admission"))
    roomy, tight = run_cell(plan, copied), run_cell(replace(plan, host=0.5), copied)
    assert roomy.held == 0.0
    assert tight.held > 0.0
    assert roomy.turns_per_hour > tight.turns_per_hour > run_cell(plan, bare).turns_per_hour


def test_parts_are_disjoint_and_by_rank() -> None:
    sessions = [session(name) for name in ("c", "a", "d", "b")]
    odd, even = part_of(sessions, SessionPart.ODD), part_of(sessions, SessionPart.EVEN)
    assert [each.name for each in odd] == ["a", "c"]
    assert [each.name for each in even] == ["b", "d"]


def test_the_command_prints_rows(tmp_path: Path) -> None:
    for number in range(4):
        requests = [
            {"t": 20.0 * i, "type": "n", "in": 2048 + 512 * i, "out": 90, "stop": "tool_use",
             "hash_ids": list(range(32 + 8 * i)), "api_time": 3.0} for i in range(6)
        ]  # fmt: skip
        file = {"block_size": 64, "requests": requests}
        (tmp_path / f"s{number}.json").write_text(json.dumps(file))
    done = kvgraph(
        "closed", str(tmp_path), "--capacity", "40", "--users", "2,6", "--hours", ".2",
        "--warm", ".1", "--begin", ".05", "--arm", "lru,lru+admission", "--processes", "1",
        "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["users"] for row in rows] == [2, 2, 6, 6]
    assert all(row["turns_per_hour"] > 0 for row in rows)
