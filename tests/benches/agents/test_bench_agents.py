"""The bench of recorded agents: their texts, its lab, its figures."""

from __future__ import annotations

import random
import tomllib
from itertools import takewhile
from pathlib import Path

import numpy as np
import pytest
from kvgraph.advisor.replay.fast import lru_hits
from kvgraph.advisor.replay.fleet_traffic import BlockNumbers, FleetRequest, lay_over_users
from kvgraph.advisor.replay.recorded_sessions import read_sessions
from kvgraph.advisor.replay.trace import Trace
from kvgraph.hooks.requests.ends import AnswerReader, read_marks
from kvgraph.hooks.settings import ENDS_VARIABLE
from kvgraph_bench.agents.agents import AgentsResult
from kvgraph_bench.agents.agents_arms import (
    BELADY,
    DEFAULT,
    KEPT_BACK,
    LRU,
    MARKED,
    AgentPass,
    AgentRun,
    LabRun,
    Room,
    lab_run,
)
from kvgraph_bench.recorded.agents_requests import (
    SESSIONS,
    SHRINK,
    AgentRequest,
    build_requests,
    endings,
    engine_trace,
    recorded_requests,
)
from kvgraph_bench.serving.cache_ledger import OwnCounts
from kvgraph_bench.serving.completions import Answer, PassResult
from kvgraph_bench.serving.workload import BLOCK

VOCABULARY = 2048


def common(one: list[int] | tuple[int, ...], other: list[int] | tuple[int, ...]) -> int:
    """How many elements two sequences share from their start."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


@pytest.fixture(scope="module")
def fleet() -> list[FleetRequest]:
    return lay_over_users(read_sessions(SESSIONS), 12, 4 * 3600.0, 5)[:500]


@pytest.fixture(scope="module")
def requests(fleet: list[FleetRequest]) -> tuple[AgentRequest, ...]:
    return build_requests(fleet, VOCABULARY, 3)


def test_texts_share_exactly_what_recordings_share(
    fleet: list[FleetRequest], requests: tuple[AgentRequest, ...]
) -> None:
    numbers = BlockNumbers(SHRINK)
    recorded = [numbers.prompt(each) for each in fleet]
    pick = random.Random(11)
    pairs = [(pick.randrange(len(fleet)), pick.randrange(len(fleet))) for _ in range(4_000)]
    pairs += [(i, j) for i in range(len(fleet)) for j in range(i) if fleet[i].run == fleet[j].run]
    for one, other in pairs:
        shared = common(recorded[one], recorded[other])
        assert common(requests[one].prompt, requests[other].prompt) == shared


def test_the_sample_of_sessions_ships_with_its_source_and_licence() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "bench" / "pyproject.toml").read_text())
    assert "sessions/*" in project["tool"]["setuptools"]["package-data"]["kvgraph_bench"]
    files = list(SESSIONS.glob("*.json.gz"))
    assert len(files) >= 20
    assert sum(path.stat().st_size for path in files) <= 300_000
    told = (SESSIONS / "README.md").read_text()
    assert "kv-cache-tester" in told
    assert "Apache-2.0" in told


def test_a_marked_engine_knows_how_recorded_answers_end(tiny_model: Path, tmp_path: Path) -> None:
    """By the tokens with which the forced answers end, and the others are told nothing."""
    room = Room(str(tiny_model), tmp_path, pool=64, max_model_len=512)
    marks = read_marks(dict(room.plan(MARKED, "marked").settings)[ENDS_VARIABLE])
    call_end, turn_end = endings(512)
    assert (marks.call_ends, marks.turn_ends) == ((call_end,), (turn_end,))
    assert ENDS_VARIABLE not in dict(room.plan(DEFAULT, "default").settings)
    reader = AnswerReader(marks, lambda tokens: "")
    assert reader.read([9, call_end]).waiting_for_tool is True
    assert reader.read([9, turn_end]).waiting_for_tool is False


def run(arm: str, pool: int, cached: int, host: int = 0) -> AgentRun:
    """An arm that found ``cached`` of 1,000 prompt tokens."""
    answer = Answer("a/0", "", 0.1, 0.2, 1000, cached, 3)
    passed = AgentPass(PassResult((answer,), 1.0), (0.0,))
    own = OwnCounts({}, mean_served_s=0.15)
    return AgentRun(arm, f"{arm}-{pool}", pool, host, 0.1, passed, own)


def lab(policy: str, pool: int, blocks: int) -> LabRun:
    return LabRun(policy, pool, np.array([blocks], dtype=np.int32), 100 * BLOCK)


def result(*runs: AgentRun, labs: tuple[LabRun, ...]) -> AgentsResult:
    return AgentsResult(Path(), (), (200, 100), 0.1, runs, labs)


def test_shares_are_of_the_way_from_stock_to_belady() -> None:
    found = result(
        run("stock", 200, 600), run("stock", 200, 590), run("stock", 200, 610),
        run("default", 200, 650), run("hints", 200, 710), run("tiers", 200, 700, host=100),
        labs=(lab(LRU, 200, 60), lab(BELADY, 200, 80)),
    ).figures().figures  # fmt: skip
    assert found["engine_inferred_share"].value == pytest.approx(0.25)
    assert found["engine_signalled_share"].value == pytest.approx(0.55)
    assert found["stock_share"].value == pytest.approx(0.6)
    assert found["stock_share"].n == 3
    assert found["tiers_share"].value == pytest.approx(0.7)
    assert "lab_live_difference" not in found, "no policy was played in the lab"


POOL = 120
TOOK_S = 0.1


@pytest.fixture(scope="module")
def lab_requests() -> tuple[AgentRequest, ...]:
    return recorded_requests(SESSIONS, 10, 1, 120, 1024)


def sent(lab_requests: tuple[AgentRequest, ...], path: Path, pause_s: float) -> Trace:
    """Each so long after the one before had ended."""
    at = [number * (TOOK_S + pause_s) for number in range(len(lab_requests))]
    return engine_trace(lab_requests, at, 1.0, path / "sent.jsonl.gz", [TOOK_S] * len(lab_requests))


@pytest.mark.parametrize("pause_s", [0.001, 1.0])
def test_lru_finds_the_same_whether_requests_take_time(
    lab_requests: tuple[AgentRequest, ...], tmp_path: Path, pause_s: float
) -> None:
    trace = sent(lab_requests, tmp_path, pause_s)
    in_time = lab_run(trace, LRU, POOL).hits
    assert in_time.tolist() == lru_hits(trace, POOL - KEPT_BACK).tolist()
    assert 0.1 < in_time.sum() / (trace.input_tokens.sum() / trace.block_size) < 0.95
