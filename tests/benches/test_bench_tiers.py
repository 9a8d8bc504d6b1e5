"""The tiers bench: its figures follow from the records, and what servers say is told."""

from __future__ import annotations

import asyncio
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from kvgraph_bench.errors import CompletionError
from kvgraph_bench.serving.completions import Answer, PassResult, all_at_once, one_at_a_time
from kvgraph_bench.serving.workload import Workload
from kvgraph_bench.tiers.tiers import IdleRates, TierResult, context_lost
from kvgraph_bench.tiers.tiers_arms import (
    ARMS,
    REACTIVE,
    SPILL_ALL,
    STOCK,
    TIERS,
    ArmRecord,
    PassRecord,
    TierCounts,
    build_tier_workload,
    chats,
    paced,
    returning,
    reusable_tokens,
    shortened,
)


@pytest.fixture(scope="module")
def workload() -> Workload:
    return build_tier_workload(2048)


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
    return TierResult("m", tmp_path, workload, [arms], IdleRates([100.0, 200.0], [99.0, 200.0]))


def value(result: TierResult, name: str) -> Any:
    return result.figures().figures[name].value


def test_figures_follow_from_the_records(result: TierResult, workload: Workload) -> None:
    stock, tiers = (result.rounds[0][arm.name].concurrent for arm in (STOCK, TIERS))
    ratio = tiers.result.recomputed_tokens / stock.result.recomputed_tokens
    assert value(result, "recomputed_ratio") == pytest.approx(ratio)
    assert value(result, "ttft_p50_ratio") == pytest.approx(0.2)  # first turns and chats are not in
    assert value(result, "ttft_p95_ratio") == pytest.approx(0.2)
    assert value(result, "prefetch_ttft_p50_ratio") == 1
    assert value(result, "stall_reduction") == pytest.approx(0.5)
    assert value(result, "prefetch_useful") == pytest.approx(0.75)
    assert value(result, "spilled_bytes_ratio") == pytest.approx(0.5)
    assert value(result, "hit_gain_over_spill_all") == 0
    assert value(result, "idle_throughput_ratio") == pytest.approx(0.995)
    assert context_lost(stock.result, workload) == 1
    assert context_lost(tiers.result, workload) == 0


def test_a_figure_is_the_median_of_rounds(result: TierResult, workload: Workload) -> None:
    for ttft_s in (0.1, 0.6):
        again = {name: record(name, each.concurrent.result, each.concurrent.tiers)
                 for name, each in result.rounds[0].items()}  # fmt: skip
        again[TIERS.name] = record(
            TIERS.name, answers(workload, 1.0, ttft_s), again[TIERS.name].concurrent.tiers
        )
        result.rounds.append(again)
    figure = result.figures().figures["prefetch_ttft_p50_ratio"]
    assert (figure.value, figure.spread, figure.n) == (1, pytest.approx((0.5, 3)), 3)
    assert value(result, "texts_identical")  # of the round that compared texts


# What servers say --------------------------------------------------------------------------------


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


def test_a_server_closes_no_connection_before_its_client(tmp_path: Path) -> None:
    kept = httpx.Limits().keepalive_expiry
    environment = STOCK.plan("m", tmp_path).environment({})
    assert kept is not None
    assert float(environment["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"]) > 2 * kept


@pytest.fixture
def hanging_up() -> Iterator[str]:
    """A server that reads a little and closes every connection."""

    class HangUp(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(1024)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), HangUp) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.parametrize("how", [one_at_a_time, all_at_once])
def test_a_lost_request_ends_the_pass_and_is_named(hanging_up: str, how: object) -> None:
    workload = paced(chats(build_tier_workload(2048), 2), 0.0)
    with pytest.raises(CompletionError, match=r"request chat-\d+/0 was lost"):
        asyncio.run(how(hanging_up, workload, lambda answer: None))  # type: ignore[operator]
