"""The lab on the requests of ``bench agents``: an engine's blocks, and an engine's time."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvgraph.advisor.replay.fast import lru_hits
from kvgraph.advisor.replay.trace import Trace
from kvgraph_bench.agents.agents_lab import KEPT_BACK, LRU, lab_run
from kvgraph_bench.recorded.agents_fleet import SESSIONS, recorded_requests
from kvgraph_bench.recorded.agents_requests import AgentRequest
from kvgraph_bench.recorded.agents_trace import engine_trace

POOL = 120
TOOK_S = 0.1


@pytest.fixture(scope="module")
def requests() -> tuple[AgentRequest, ...]:
    return recorded_requests(SESSIONS, 10, 1, 120, 1024)


def sent(requests: tuple[AgentRequest, ...], path: Path, pause_s: float) -> Trace:
    """Each so long after the one before had ended."""
    at = [number * (TOOK_S + pause_s) for number in range(len(requests))]
    return engine_trace(requests, at, 1.0, path / "sent.jsonl.gz", [TOOK_S] * len(requests))


@pytest.mark.parametrize("pause_s", [0.001, 1.0])
def test_lru_finds_the_same_whether_requests_take_time(
    requests: tuple[AgentRequest, ...], tmp_path: Path, pause_s: float
) -> None:
    trace = sent(requests, tmp_path, pause_s)
    in_time = lab_run(trace, LRU, POOL).hits
    assert in_time.tolist() == lru_hits(trace, POOL - KEPT_BACK).tolist()
    assert 0.1 < in_time.sum() / (trace.input_tokens.sum() / trace.block_size) < 0.95
