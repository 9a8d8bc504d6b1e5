"""The lab in one call: the same figures as its table has, for a policy's name or a policy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from kvgraph import ClassicPolicy, KvGraphError, Trace, hit_rate
from kvgraph.advisor.replay.arms import Settings
from kvgraph.advisor.replay.tables import hit_table
from made_traffic import agents, made

CAPACITY = 200


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    folder: Path = tmp_path_factory.mktemp("trace")
    return made(folder, agents(np.random.default_rng(3)))


def test_a_name_finds_what_the_table_says(trace: Trace) -> None:
    arms = ["lru", "classic", "belady"]
    table = hit_table(trace, arms, [CAPACITY], Settings(), processes=1)
    for arm in arms:
        assert hit_rate(trace, CAPACITY, arm) == table.rates[arm][CAPACITY]


def test_a_policy_finds_what_its_name_does(trace: Trace) -> None:
    assert hit_rate(trace, CAPACITY, ClassicPolicy()) == hit_rate(trace, CAPACITY, "classic")


def test_who_is_no_policy_is_refused_by_name(trace: Trace) -> None:
    with pytest.raises(KvGraphError, match=r"'gremlin'.*lifecycle"):
        hit_rate(trace, CAPACITY, "gremlin")
