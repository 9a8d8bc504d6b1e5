"""What is counted when a part of a fleet is killed, and that nothing fails which had not begun."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
from kvgraph_bench.errors import BenchError
from kvgraph_bench.figures import Figures
from kvgraph_bench.fleet.apart import run_apart
from kvgraph_bench.fleet.fleet_kills import BEGUN_THERE, LONGEST_S, STAGE, add_waves, failed_in
from kvgraph_bench.fleet.kill_wave import LEAST, KillWave, WaveEnd
from kvgraph_bench.fleet.mooncake_processes import why_not
from kvgraph_bench.fleet.stand_in_engine import StandInEngine

BODIES = [{"model": "m", "prompt": str(number)} for number in range(LEAST + 2)]
LAST = 'data: {"choices":[],"usage":{"prompt_tokens_details":{"cached_tokens":7}}}\n\n'
PIECES = ['data: {"choices":[]}\n\n', LAST + "data: [DONE]\n\n"]


def play(addresses: int = 1, killed: bool = False, pieces: list[str] = PIECES) -> dict[str, Any]:
    """What came of a wave before stand-ins, of which the first may be killed; its answers never end
    before.
    """
    return asyncio.run(_wave(addresses, killed, pieces)).facts()


async def _wave(addresses: int, killed: bool, pieces: list[str]) -> WaveEnd:
    engines = [StandInEngine() for _ in range(addresses)]
    for number, engine in enumerate(engines):
        engine.pieces = pieces
        engine.hold = asyncio.Event() if number == 0 else None
        await engine.start()

    async def kill() -> None:
        if killed:
            engines[0].kill()
        else:
            engines[0].hold.set()

    end = await KillWave([each.url for each in engines], BODIES).play(kill)
    for engine in engines:
        engine.kill()
    return end


def test_a_wave_that_nothing_befalls_is_answered_whole() -> None:
    facts = play()
    assert facts["in_flight"] == facts["whole"] == len(BODIES)
    assert (facts["cut"], facts["failed"], facts["asked_again"]) == (0, 0, 0)
    assert facts["found"] == 7 * len(BODIES)


def test_an_error_that_is_streamed_is_no_answer_and_says_why() -> None:
    facts = play(pieces=[PIECES[0], 'data: {"error": {"code": 500}}\n\ndata: [DONE]\n\n'])
    assert (facts["cut"], facts["whole"]) == (len(BODIES), 0)
    assert facts["why"] == ['data: {"error": {"code": 500}}']


def test_a_wave_that_nobody_answers_ends_and_says_why() -> None:
    with pytest.raises(
        BenchError, match="only 0 requests were in flight at the kill: ConnectError"
    ):
        asyncio.run(KillWave([StandInEngine().url], BODIES).play(lambda: asyncio.sleep(0)))


@pytest.mark.parametrize("addresses", [1, 2])
def test_an_answer_that_had_begun_is_cut_and_asked_for_nowhere_else(addresses: int) -> None:
    facts = play(addresses, killed=True)
    assert facts["cut"] >= facts["begun"] >= 2
    assert facts["cut"] + facts["failed"] + facts["whole"] == len(BODIES)
    if addresses == 2:
        assert facts["failed"] == 0
        assert facts["whole"] == facts["asked_again"]


def test_what_is_cut_counts_as_failed_unless_its_answer_was_passed_on_by_what_was_killed() -> None:
    facts: dict[str, Any] = {"cut": 2, "failed": 1}
    assert failed_in("engine", facts) == failed_in("router", facts) == 1
    assert failed_in("master", facts) == failed_in("sidecar", facts) == 3


def test_too_few_in_flight_is_a_miss() -> None:
    facts = {"cut": 0, "failed": 0, "asked_again": 0, "store_loaded": 0}
    figures = Figures("fleet")
    add_waves(figures, {name: {**facts, "in_flight": 19} for name in BEGUN_THERE})
    assert figures.figures["in_flight_at_kill"].is_missed


@pytest.fixture
def folder() -> Iterator[str]:
    """Short enough for a socket's path."""
    if reason := why_not():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="kvg-") as name:
        yield name


@pytest.mark.timing
def test_few_requests_wait_for_a_store_whose_master_is_dead(folder: str) -> None:
    waits = run_apart(STAGE, "breaker", print, LONGEST_S)
    assert waits["longest_s"] < 1.0
    assert waits["requests"] < waits["asked"] / 4


@pytest.mark.engine
@pytest.mark.timing
def test_nothing_fails_that_had_not_begun_whatever_is_killed(folder: str) -> None:
    """Three real engines, two proxies, a sidecar, and Mooncake's master and owner."""
    waves = run_apart(STAGE, folder, print, LONGEST_S)
    assert list(waves) == ["sidecar", "owner", "router", "engine", "master"]
    assert {name: failed_in(name, each) for name, each in waves.items()} == dict.fromkeys(waves, 0)
    assert min(each["in_flight"] for each in waves.values()) >= LEAST
    assert sum(each["store_loaded"] for each in waves.values()) > 0, json.dumps(waves)
