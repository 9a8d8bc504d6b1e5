"""``kvgraph plan``: what each plan does, and which is the cheapest that is fast enough."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from command_line import kvgraph
from kvgraph.advisor.replay.plan import (
    Plan,
    PlanTerms,
    cheapest,
    compare_plans,
    plan,
    plans_of,
    waits,
)
from kvgraph.advisor.replay.reader import load_trace
from kvgraph.advisor.replay.trace import ReplayError
from made_trace import chat_trace


def test_requests_wait_for_those_before_them_at_their_engine() -> None:
    at, needs = np.array([0.0, 1.0, 1.0, 9.0]), np.array([3.0, 2.0, 1.0, 1.0])
    ttft, busiest = waits(at, needs, [0, 0, 1, 0])
    assert ttft.tolist() == [3.0, 4.0, 1.0, 1.0]
    assert busiest == pytest.approx(0.6)


def test_more_engines_and_more_memory_cost_more_and_wait_less() -> None:
    trace = chat_trace(300)
    terms = PlanTerms(blocks=60, prefill_tokens_per_s=300.0, host_cost=0.1)
    found = {row.plan: row for row in compare_plans(trace, plans_of([1, 4], [0, 2]), terms)}
    alone, four = found[Plan(1, 0, "home")], found[Plan(4, 0, "home")]
    tiered = found[Plan(1, 2, "home")]
    assert (alone.cost, four.cost, tiered.cost) == (1.0, 4.0, pytest.approx(1.2))
    assert four.ttft_p95_s < alone.ttft_p95_s
    assert tiered.host_rate > 0
    assert alone.host_rate == 0
    assert found[Plan(4, 0, "home")].hit_rate > found[Plan(4, 0, "round-robin")].hit_rate


def test_the_cheapest_that_is_fast_enough_is_found_or_none() -> None:
    trace = chat_trace(200)
    found = compare_plans(trace, plans_of([1, 2], [0]), PlanTerms(60, 2000.0))
    assert [row.cost for row in found] == sorted(row.cost for row in found)
    assert cheapest(found, 1e-9) is None
    assert cheapest(found, 1e9) == found[0]


def planned(trace: Path, *words: str) -> str:
    """What the command says of a trace; it leaves a picture beside it."""
    more = ["--engines", "1,2", "--processes", "1", "--picture", str(trace.with_suffix(".png"))]
    done = kvgraph("plan", str(trace), *words, *more)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_command_prints_plans_and_saves_a_picture(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 500 * n, "input_length": 1024, "output_length": 5, "hash_ids": [n % 7, n]}
        for n in range(40)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    said = planned(path, "--blocks", "20", "--host", "0,1")
    assert "cheapest with a TTFT of 2 s at p95: 1 engine of 20 blocks" in said
    assert "larger than a pool" not in said
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_numbers_that_are_none_are_named(tmp_path: Path) -> None:
    for engines, host in (("0", "0"), ("1.5", "0"), ("1", "x"), ("1", "-1")):
        with pytest.raises(ReplayError, match=r"--(engines|host) .*allowed"):
            plan(tmp_path / "none", 10, engines, host)


def long_trace(path: Path, prompts: list[int], output: int = 1) -> Path:
    """Requests of so many blocks of 512 tokens, all of one prefix."""
    rows = [
        {"timestamp": 1000 * n, "input_length": 512 * blocks - output, "output_length": output,
         "hash_ids": list(range(blocks))}
        for n, blocks in enumerate(prompts)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("prompts", [[5] * 6, [2] * 9 + [5]])
def test_a_plan_has_pools_in_which_every_prompt_fits(tmp_path: Path, prompts: list[int]) -> None:
    asked = long_trace(tmp_path / "t.jsonl", prompts), "--blocks", "4", "--host", "0"
    said = " ".join(planned(*asked).split())
    count = prompts.count(5)
    assert f"{count} of {len(prompts)} requests are larger than a pool of 4 blocks" in said
    assert "pools of 8 blocks, 2 times as large" in said
    assert "1 engine of 8 blocks" in said
    found = json.loads(planned(*asked, "--json"))
    assert (found["too_large"], found["best"]["blocks"], found["best"]["cost"]) == (count, 8, 2.0)
    assert found["best"]["hit_rate"] > 0.5
    assert all(row["refused"] == 0 for row in found["plans"])


def test_an_answer_takes_room_too(tmp_path: Path) -> None:
    trace = load_trace(long_trace(tmp_path / "t.jsonl", [4]))
    longer = replace(trace, output_tokens=trace.output_tokens + 1)
    terms = PlanTerms(4)
    assert terms.for_trace(trace) == (terms, 0)
    assert terms.for_trace(longer)[1] == 1


def test_what_refuses_a_request_is_not_the_cheapest(tmp_path: Path) -> None:
    trace = load_trace(long_trace(tmp_path / "t.jsonl", [5] * 6))
    found = compare_plans(trace, plans_of([1, 2], [0]), PlanTerms(4))
    assert [row.refused for row in found] == [6] * len(found)
    assert cheapest(found, 1e9) is None
