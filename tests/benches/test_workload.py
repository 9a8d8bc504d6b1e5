"""The scripted workload of ``bench tiers`` is the same every time, and says the truth of itself."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from kvgraph.bench.serving.completions import request_body
from kvgraph.bench.serving.workload import BLOCK, Turn, Workload
from kvgraph.bench.tiers.tiers_workload import build_tier_workload
from kvgraph.graph.types import PROTECTED_LAYERS


@pytest.fixture(scope="module")
def workload() -> Workload:
    return build_tier_workload(2048)


def agents(workload: Workload) -> list[tuple[Turn, ...]]:
    return [s.turns for s in workload.sessions if s.name.startswith("agent")]


def hints(turn: Turn) -> dict[str, Any]:
    assert turn.hints is not None
    return turn.hints


def test_same_arguments_give_the_same_requests(workload: Workload) -> None:
    assert build_tier_workload(2048).in_order() == workload.in_order()
    assert build_tier_workload(2048, seed=8).in_order() != workload.in_order()


def test_segments_cover_each_prompt_without_gap(workload: Workload) -> None:
    for turn in workload.in_order():
        edges = [(s["start"], s["end"]) for s in turn.segments()]
        assert edges[0][0] == 0
        assert edges[-1][1] == len(turn.token_ids)
        assert all(before[1] == after[0] for before, after in itertools.pairwise(edges))


def test_every_request_comes_once_and_turns_stay_in_order(workload: Workload) -> None:
    order = workload.in_order()
    assert len({turn.name for turn in order}) == len(order)
    for turns in agents(workload):
        numbers = [turn.number for turn in order if turn.session == turns[0].session]
        assert numbers == list(range(len(turns)))


def test_later_turns_extend_the_earlier(workload: Workload) -> None:
    for turns in agents(workload):
        for before, after in itertools.pairwise(turns):
            assert after.token_ids[: len(before.token_ids)] == before.token_ids


def test_agents_of_all_kinds_share_protected_axioms(workload: Workload) -> None:
    heads = {tuple(turns[0].token_ids[: 2 * BLOCK]) for turns in agents(workload)}
    assert len(heads) == 1
    charters = {tuple(turns[0].token_ids[: 8 * BLOCK]) for turns in agents(workload)}
    assert len(charters) == 2


def test_protected_spans_fill_whole_blocks(workload: Workload) -> None:
    for turns in agents(workload):
        for span in turns[0].prompt:
            assert span.layer not in PROTECTED_LAYERS or len(span.tokens) % BLOCK == 0


def test_a_session_that_is_over_is_told_with_its_last_turn(workload: Workload) -> None:
    for turns in agents(workload):
        assert not any("session_ended" in hints(turn) for turn in turns[:-1])
        assert hints(turns[-1]) == {"session": turns[-1].session, "session_ended": True}


def test_some_callers_tell_the_engine_nothing(workload: Workload) -> None:
    silent = [turn for turn in workload.in_order() if turn.hints is None]
    assert silent
    assert all("kv_transfer_params" not in request_body(turn, "run") for turn in silent)


def test_a_request_is_salted_and_named_by_its_pass(workload: Workload) -> None:
    turn = agents(workload)[0][0]
    body = request_body(turn, "sequential")
    assert body["cache_salt"] == "sequential"
    assert body["session_id"] == body["kv_transfer_params"]["kvgraph"]["session"]
    assert body["session_id"] != request_body(turn, "concurrent")["session_id"]


def test_no_prompt_outgrows_the_model(workload: Workload) -> None:
    assert max(len(t.token_ids) + t.max_tokens for t in workload.in_order()) <= 1536
