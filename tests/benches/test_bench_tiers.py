"""The tiers bench: its workload is what it claims, and its figures follow from the records."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kvgraph.bench.errors import ServerError
from kvgraph.bench.serving.completions import Answer
from kvgraph.bench.serving.own_counts import OwnCounts, parse_counts
from kvgraph.bench.serving.passes import PassResult
from kvgraph.bench.serving.workload import BLOCK, Turn, Workload
from kvgraph.bench.tiers.tiers import reason
from kvgraph.bench.tiers.tiers_arms import (
    ARMS,
    MAX_MODEL_LEN,
    POOL_BLOCKS,
    REACTIVE,
    SPILL_ALL,
    STOCK,
    TIERS,
    ArmRecord,
    PassRecord,
    TierCounts,
    dashboard_url,
)
from kvgraph.bench.tiers.tiers_figures import IdleRates, TierResult, context_lost
from kvgraph.bench.tiers.tiers_report import draw, save_details
from kvgraph.bench.tiers.tiers_workload import (
    EXPECTATION_ERROR,
    build_tier_workload,
    paced,
    returning,
    reusable_tokens,
    shortened,
    working_set_blocks,
)


@pytest.fixture(scope="module")
def workload() -> Workload:
    return build_tier_workload(2048)


def agents(workload: Workload) -> list[tuple[Turn, ...]]:
    return [session.turns for session in workload.sessions if len(session.turns) > 1]


# The workload ------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_requests(workload: Workload) -> None:
    assert build_tier_workload(2048) == workload
    assert build_tier_workload(2048, seed=12) != workload


def test_a_pace_changes_times_and_nothing_else(workload: Workload) -> None:
    slow = paced(workload, 2.0)
    for session, slower in zip(workload.sessions, slow.sessions, strict=True):
        assert slower.starts_s == 2 * session.starts_s
        for turn, later in zip(session.turns, slower.turns, strict=True):
            assert later.pause_s == 2 * turn.pause_s
            assert later.token_ids == turn.token_ids
            said, says = turn.hints or {}, later.hints or {}
            assert says.keys() == said.keys()
            due = said.get("expected_return_s", 0.0)
            assert says.get("expected_return_s", 0.0) == pytest.approx(2 * due, abs=0.011)
    assert paced(workload, 1.0) == workload


def test_the_pool_holds_a_request_but_not_what_will_be_asked_again(workload: Workload) -> None:
    longest = max(len(turn.token_ids) + turn.max_tokens for turn in workload.in_order())
    assert longest <= MAX_MODEL_LEN <= POOL_BLOCKS * BLOCK
    assert 0.3 <= POOL_BLOCKS / working_set_blocks(workload) <= 0.4


def test_a_returning_turn_extends_the_turn_before(workload: Workload) -> None:
    after = {turn.name: turn for turn in workload.in_order()}
    for name, before in returning(workload).items():
        ids = before.token_ids
        assert after[name].token_ids[: len(ids)] == ids
        reusable, shared = reusable_tokens(before)
        assert 0 < shared < reusable <= len(ids)
        assert reusable % BLOCK == shared % BLOCK == 0


def test_stated_returns_are_off_by_a_fifth_at_most(workload: Workload) -> None:
    stated = 0
    for turns in agents(workload):
        for turn, later in itertools.pairwise(turns):
            assert turn.hints is not None
            expected = turn.hints.get("expected_return_s")
            if expected is not None:
                stated += 1
                assert turn.hints["waiting_for_tool"]
                assert abs(expected / later.pause_s - 1) <= EXPECTATION_ERROR + 0.01
    assert 0.5 < stated / len(returning(workload)) < 0.9


def test_some_pauses_are_unstated_and_every_agent_says_when_it_is_over(workload: Workload) -> None:
    hints = [turn.hints or {} for turns in agents(workload) for turn in turns[:-1]]
    assert any("waiting_for_tool" not in hint for hint in hints)
    assert any("waiting_for_tool" in hint and "expected_return_s" not in hint for hint in hints)
    assert not any("session_ended" in hint for hint in hints)
    assert all((turns[-1].hints or {}).get("session_ended") for turns in agents(workload))


def test_chats_never_return_and_half_of_them_say_so(workload: Workload) -> None:
    chats = [s.turns for s in workload.sessions if s.name.startswith("chat")]
    assert all(len(turns) == 1 for turns in chats)
    said = sum(turns[0].hints is not None for turns in chats)
    assert 2 * said == len(chats)


def test_shortened_keeps_the_first_turns_as_they_are(workload: Workload) -> None:
    names = {turn.name: turn for turn in workload.in_order()}
    few = shortened(workload, 2).in_order()
    assert all(turn == names[turn.name] and turn.number < 2 for turn in few)
    assert len(few) == sum(min(2, len(s.turns)) for s in workload.sessions)


# Figures from canned records ---------------------------------------------------------------------


def answers(workload: Workload, cached: float, ttft_s: float, text: str = "w") -> PassResult:
    """Every turn answered alike; a returning one finds ``cached`` of what it could."""
    before = returning(workload)
    found = []
    for turn in workload.in_order():
        reusable = reusable_tokens(before[turn.name])[0] if turn.name in before else 0
        prompt = len(turn.token_ids)
        late = ttft_s if turn.name in before else 9.0
        found.append(Answer(turn.name, text, late, 10.0, prompt, int(cached * reusable), 16))
    return PassResult(tuple(found), 100.0)


def record(
    name: str, result: PassResult, tiers: TierCounts | None, alone: PassResult | None = None
) -> ArmRecord:
    sequential = None if alone is None else PassRecord(alone, {}, tiers)
    return ArmRecord(name, sequential, PassRecord(result, {"local_compute": 1.0}, tiers))


@pytest.fixture
def result(workload: Workload, tmp_path: Path) -> TierResult:
    alone = answers(shortened(workload, 2), 0.0, 1.0)
    slow, fast = answers(workload, 0.0, 1.0), answers(workload, 1.0, 0.2)
    counts = {
        TIERS: TierCounts(spilled=50, stalls=30, prefetched=40, prefetch_useful=30),
        REACTIVE: TierCounts(spilled=50, stalls=60),
        SPILL_ALL: TierCounts(spilled=100, stalls=60),
    }
    arms = {arm.name: record(arm.name, fast, count, alone) for arm, count in counts.items()}
    arms[STOCK.name] = record(STOCK.name, slow, None, alone)
    return TierResult("m", tmp_path, workload, arms, IdleRates([100.0, 200.0], [99.0, 200.0]))


def value(result: TierResult, name: str) -> Any:
    return result.figures().figures[name].value


def test_every_figure_has_its_target_in_its_name(result: TierResult) -> None:
    named = [name for name, figure in result.figures().figures.items() if figure.target]
    assert named[:2] == ["texts_identical", "concurrent_agreement"]
    assert set(named) == {
        "texts_identical", "concurrent_agreement", "recomputed_ratio", "ttft_p50_ratio",
        "ttft_p95_ratio", "stall_reduction", "prefetch_useful", "spilled_bytes_ratio",
        "hit_gain_over_spill_all", "idle_throughput_ratio",
    }  # fmt: skip


def test_figures_follow_from_the_records(result: TierResult, workload: Workload) -> None:
    stock, tiers = (result.arms[arm.name].concurrent for arm in (STOCK, TIERS))
    assert stock is not None
    assert tiers is not None
    ratio = tiers.result.recomputed_tokens / stock.result.recomputed_tokens
    assert value(result, "recomputed_ratio") == pytest.approx(ratio)
    assert value(result, "ttft_p50_ratio") == pytest.approx(0.2)  # first turns and chats are not in
    assert value(result, "ttft_p95_ratio") == pytest.approx(0.2)
    assert value(result, "stall_reduction") == pytest.approx(0.5)
    assert value(result, "prefetch_useful") == pytest.approx(0.75)
    assert value(result, "spilled_bytes_ratio") == pytest.approx(0.5)
    assert value(result, "hit_gain_over_spill_all") == 0
    assert value(result, "idle_throughput_ratio") == pytest.approx(0.995)
    assert context_lost(stock.result, workload) == 1
    assert context_lost(tiers.result, workload) == 0


def test_one_other_text_in_any_arm_is_a_difference(result: TierResult, workload: Workload) -> None:
    assert value(result, "texts_identical") is True
    other = answers(shortened(workload, 2), 1.0, 0.2)
    changed = replace(other.answers[3], text="v")
    other = PassResult((*other.answers[:3], changed, *other.answers[4:]), 1.0)
    arm = result.arms[SPILL_ALL.name]
    result.arms[SPILL_ALL.name] = replace(arm, sequential=PassRecord(other, {}, None))
    assert value(result, "texts_identical") is False


def test_agreement_is_that_of_the_worst_arm(result: TierResult, workload: Workload) -> None:
    assert value(result, "concurrent_agreement") == 100
    result.arms[TIERS.name] = record("tiers", answers(workload, 1.0, 0.2, "v"), TierCounts())
    assert value(result, "concurrent_agreement") == 0
    assert value(result, "stock_self_agreement") == 100


def test_a_part_gives_its_own_figures_only(result: TierResult) -> None:
    idle = TierResult("m", result.out, result.workload, {}, result.idle)
    assert set(idle.figures().figures) >= {"idle_throughput_ratio"}
    assert "texts_identical" not in idle.figures().figures


def test_without_a_stall_or_a_prefetch_there_is_nothing_to_divide(result: TierResult) -> None:
    for arm in (TIERS, REACTIVE, SPILL_ALL):
        pressure = result.arms[arm.name].concurrent
        assert pressure is not None
        result.arms[arm.name] = record(arm.name, pressure.result, TierCounts())
    missing = {"stall_reduction", "prefetch_useful", "spilled_bytes_ratio"}
    assert not missing & set(result.figures().figures)


def test_details_and_picture_are_written(result: TierResult) -> None:
    result.refused["Rival"] = "RuntimeError: not here"
    details = json.loads(save_details(result).read_text())
    assert set(details["arms"]) == {arm.name for arm in ARMS}
    assert details["refused"] == {"Rival": "RuntimeError: not here"}
    assert details["arms"]["tiers"]["concurrent"]["tiers"]["prefetch_useful"] == 30
    assert draw(result).read_bytes().startswith(b"\x89PNG")


# What servers say --------------------------------------------------------------------------------


def test_what_vllm_counts_is_read_from_its_page_of_metrics() -> None:
    page = (
        "# TYPE vllm:prompt_tokens_by_source_total counter\n"
        'vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} 90212.0\n'
        'vllm:prompt_tokens_by_source_created{engine="0",source="local_compute"} 1.7e+09\n'
        'vllm:prompt_tokens_by_source_total{source="external_kv_transfer",engine="0"} 12.0\n'
    )
    with pytest.raises(ServerError, match=r"no vllm:request_inference_time_seconds_count, "):
        parse_counts(page)
    page += (
        "# TYPE vllm:request_inference_time_seconds histogram\n"
        'vllm:request_inference_time_seconds_bucket{engine="0",le="0.3"} 4.0\n'
        'vllm:request_inference_time_seconds_count{engine="0"} 4.0\n'
        'vllm:request_inference_time_seconds_sum{engine="0"} 0.5\n'
    )
    sources = {"local_compute": 90212.0, "external_kv_transfer": 12.0}
    assert parse_counts(page) == OwnCounts(sources, mean_served_s=0.125)


def test_the_sidecar_of_the_last_start_counts() -> None:
    line = "INFO kvgraph: sidecar (pid 7) listens on ipc:///x, dashboard at http://127.0.0.1:{}/\n"
    assert dashboard_url(line.format(1) + line.format(2)) == "http://127.0.0.1:2"
    with pytest.raises(ServerError, match="AITHER_KVCACHE_SIDECAR"):
        dashboard_url("nothing of the kind")


def test_counters_of_a_pass_are_differences_and_block_sizes_are_not() -> None:
    before, after = TierCounts(spilled=3, stall_s=0.5), TierCounts(spilled=10, stall_s=2.0)
    assert after.since(before) == TierCounts(spilled=7, stall_s=1.5)


def test_the_reason_of_a_refusal_is_the_first_exception() -> None:
    log = (
        "(EngineCore pid=3) ERROR 11-21 03:22:49 [core.py:1510]     raise RuntimeError(\n"
        "(EngineCore pid=3) ERROR 11-21 03:22:49 [core.py:1510] RuntimeError: Worker failed with "
        "error 'only on GPUs', please check the stack trace above for the root cause\n"
        "RuntimeError: Engine core initialization failed.\n"
    )
    assert reason(log) == "RuntimeError: Worker failed with error 'only on GPUs'"
    assert reason("") == "no exception in its log"


def test_arms_differ_by_their_settings_alone(tmp_path: Path) -> None:
    stock, *others = (arm.plan("m", tmp_path) for arm in ARMS)
    assert all(plan.command(1) == stock.command(1) for plan in others)
    ours = [dict(plan.environment({}).items() - stock.environment({}).items()) for plan in others]
    assert all(env.pop("AITHER_KVCACHE_GRAPH") == "1" for env in ours)
    assert all(env.pop("AITHER_KVCACHE_HINTS") == "all" for env in ours)
    assert all(float(env.pop("AITHER_KVCACHE_WARM_GIB")) > 0 for env in ours)
    assert all(env.pop("AITHER_KVCACHE_ADMISSION") == "0" for env in ours)
    assert ours == [
        {},
        {"AITHER_KVCACHE_PREFETCH": "0"},
        {"AITHER_KVCACHE_PREFETCH": "0", "AITHER_KVCACHE_SPILL": "all"},
    ]
