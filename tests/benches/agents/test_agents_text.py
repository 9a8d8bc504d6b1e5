"""Recorded sessions as token ids: what the recordings share, the texts share, and no token more."""

from __future__ import annotations

import random
import tomllib
from itertools import takewhile
from pathlib import Path

import pytest
from kvgraph.advisor.replay.fleet_traffic import BlockNumbers, FleetRequest, lay_over_users
from kvgraph.advisor.replay.recordings import read_sessions
from kvgraph.hooks.requests.ends import AnswerReader, read_marks
from kvgraph.hooks.settings import ENDS_VARIABLE
from kvgraph_bench.agents.agents_arms import DEFAULT, MARKED, Room
from kvgraph_bench.recorded.agents_fleet import SESSIONS
from kvgraph_bench.recorded.agents_requests import SHRINK, AgentRequest, build_requests
from kvgraph_bench.recorded.agents_text import endings

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
