"""The lifecycle policy on traffic that it was not built on, beside simple policies."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from kvgraph.advisor.replay.arms import Settings, run_arm
from kvgraph.advisor.replay.trace import Trace
from made_traffic import Maker, agents, chats, made, recent, turned

SIMPLE = ("lru", "lfu-history", "session-ttl")
CAPACITY = 400


def rate(trace: Trace, arm: str) -> float:
    return float(run_arm(arm, trace, CAPACITY, Settings()).sum()) / trace.prompt_blocks


MAKERS: dict[str, Maker] = {
    "chats": chats,
    "slow chats": partial(chats, pace=5.0),
    "fast chats": partial(chats, pace=0.2),
    "agents": agents,
    "turned": turned,
}


@pytest.mark.parametrize("kind", MAKERS)
def test_it_is_never_worse_than_simple_policies(tmp_path: Path, kind: str) -> None:
    trace = made(tmp_path, MAKERS[kind](np.random.default_rng(11)))
    best = max(rate(trace, arm) for arm in SIMPLE)
    assert rate(trace, "lifecycle") >= best - 0.002


@pytest.mark.parametrize("seed", [1, *(pytest.param(n, marks=pytest.mark.large) for n in (2, 3))])
def test_it_stays_with_lru_where_recency_is_all_there_is_to_know(tmp_path: Path, seed: int) -> None:
    trace = made(tmp_path, recent(np.random.default_rng(seed)))
    assert rate(trace, "lifecycle") >= rate(trace, "lru") - 0.005
