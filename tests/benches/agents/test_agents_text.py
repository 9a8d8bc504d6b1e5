"""Recorded sessions as token ids: what the recordings share, the texts share, and no token more."""

from __future__ import annotations

import random
import tomllib
from itertools import takewhile
from pathlib import Path

import pytest
from kvgraph.advisor.replay.fleet_traffic import BlockNumbers, FleetRequest, lay_over_users
from kvgraph.advisor.replay.recordings import read_sessions
from kvgraph.bench.agents.agents_arms import DEFAULT, MARKED, Room
from kvgraph.bench.errors import TrafficError
from kvgraph.bench.recorded.agents_fleet import SESSIONS
from kvgraph.bench.recorded.agents_requests import SHRINK, AgentRequest, build_requests
from kvgraph.bench.recorded.agents_text import ROOT, Kind, TokenWriter, endings
from kvgraph.hooks.requests.ends import AnswerReader, read_marks
from kvgraph.hooks.settings import ENDS_VARIABLE

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


def test_a_prompt_is_as_long_as_recorded_and_contains_the_answer_before_it(
    fleet: list[FleetRequest], requests: tuple[AgentRequest, ...]
) -> None:
    by_turn = {(f.run, f.index): r for f, r in zip(fleet, requests, strict=True)}
    contained = 0
    for recorded, request in zip(fleet, requests, strict=True):
        turn = recorded.turn
        assert len(request.prompt) == turn.input_tokens // SHRINK
        total = (turn.input_tokens + turn.output_tokens) // SHRINK
        assert len(request.prompt) + len(request.answer) == total + 1  # and a token that ends it
        after = by_turn.get((recorded.run, recorded.index + 1))
        if after is None or common(after.prompt, request.prompt) < len(request.prompt):
            continue
        said = request.prompt + request.answer[:-1]
        if len(after.prompt) >= len(said):
            contained += 1
            assert after.prompt[: len(said)] == said
    assert contained > len(fleet) / 2


def test_tokens_tell_what_they_are_of_and_stay_clear_of_special_ones(
    requests: tuple[AgentRequest, ...],
) -> None:
    quarter = VOCABULARY * 3 // 16
    bands = [VOCABULARY // 8 + kind * quarter for kind in Kind]
    for request in requests:
        head = max((end for _, _, end in request.layers), default=0)
        assert all(bands[Kind.HEAD] <= t < bands[Kind.USER] for t in request.prompt[:head])
        assert all(bands[Kind.USER] <= t < VOCABULARY * 7 // 8 for t in request.prompt[head:])
        assert all(bands[Kind.ANSWER] <= t < VOCABULARY * 7 // 8 for t in request.answer[:-1])
        assert request.answer[-1] in endings(VOCABULARY)
        assert (request.answer[-1] == endings(VOCABULARY)[0]) == (request.waiting is True)


def test_the_same_fleet_gives_the_same_requests(
    fleet: list[FleetRequest], requests: tuple[AgentRequest, ...]
) -> None:
    assert build_requests(fleet, VOCABULARY, 3) == requests
    assert build_requests(fleet, VOCABULARY, 4) != requests


def test_a_vocabulary_that_cannot_tell_siblings_apart_is_refused() -> None:
    writer = TokenWriter(64, 1)
    tokens = {writer.token(number, ROOT, Kind.TOOL) for number in range(12)}
    assert len(tokens) == 12
    assert writer.token(3, ROOT, Kind.TOOL) in tokens
    with pytest.raises(TrafficError, match="larger vocabulary"):
        writer.token(12, ROOT, Kind.TOOL)


def test_hints_are_said_by_those_who_hint_and_stretched_with_time(
    requests: tuple[AgentRequest, ...],
) -> None:
    waiting = next(r for r in requests if r.returns_s)
    ended = next(r for r in requests if r.ended)
    assert "kv_transfer_params" not in waiting.body(0.1, hinted=False)
    assert "session_id" not in waiting.body(0.1, hinted=False)
    said = waiting.body(0.1, hinted=True)["kv_transfer_params"]["kvgraph"]
    assert said["waiting_for_tool"] is True
    assert said["expected_return_s"] == pytest.approx(0.1 * (waiting.returns_s or 0), abs=1e-3)
    assert ended.body(0.1, hinted=True)["kv_transfer_params"]["kvgraph"]["session_ended"] is True
    layered = waiting.body(0.1, hinted=True, layered=True)["kv_transfer_params"]["kvgraph"]
    assert [part["layer"] for part in layered["segments"]] == ["capabilities", "rules"]


def test_the_sample_of_sessions_ships_with_its_source_and_licence() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    assert "sessions/*" in project["tool"]["setuptools"]["package-data"]["kvgraph.bench"]
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
