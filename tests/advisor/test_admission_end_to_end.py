"""Admission from end to end: vLLM's scheduler on paper, a real sidecar, and what it says."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hall import held_of
from kvgraph.advisor.cli import build_app
from kvgraph.hooks.settings import SIDECAR_VARIABLE
from kvgraph.hooks.vllm.api.refusal import ask_sidecar
from kvgraph.hooks.vllm.patches import bind_scheduler
from kvgraph_bench.paper.paper_engine import PaperEngine, Shape
from kvgraph_bench.sidecars.sidecar_process import SidecarProcess
from paper import text
from typer.testing import CliRunner

# Live clocks decide here who waits.
pytestmark = [pytest.mark.usefixtures("vllm_loaded"), pytest.mark.timing]

POOL = 65
LARGE = 14  # blocks of a session's context: four of them fit


@pytest.fixture
def sidecar(socket_directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SidecarProcess]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(socket_directory))
    with SidecarProcess(socket_directory) as process:
        monkeypatch.setenv(SIDECAR_VARIABLE, process.endpoint)
        yield process


@pytest.fixture
def engine(paper_config: Any, sidecar: SidecarProcess) -> Iterator[PaperEngine]:
    """One that computes again and again what it held a moment ago, until its sidecar says so."""
    engine = PaperEngine(paper_config, Shape(blocks=POOL, warm=None), endpoint=sidecar.endpoint)
    bind_scheduler(engine.scheduler)
    try:
        thrash(engine)
        yield engine
    finally:
        engine.close()


def thrash(engine: PaperEngine) -> None:
    deadline = time.monotonic() + 60
    seed = 0
    while (word := engine.side.client.admission()) is None or word.room_blocks is None:
        assert time.monotonic() < deadline, "the sidecar never said that there is no room"
        engine.serve(text(LARGE + seed // 8, seed % 8), session_id=f"agent-{seed % 8}")
        seed += 1
        time.sleep(0.02)
    for _ in range(100):  # prompts queue, of less than a block each: none of them can be held
        for _ in range(engine.scheduler.max_num_running_reqs + 1):
            engine.ask(list(text(1, 9001))[:4], 1)
        engine.step()
    engine.settle()


def play(engine: PaperEngine, done: Callable[[], object], seconds: float = 20.0) -> bool:
    """Steps, as on an engine that always has something to do, until ``done``."""
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            return False
        if not engine.scheduler.requests:  # held at first, until the engine was idle for a while
            engine.ask(text(2, 9000), 400, session_id="busy")
        engine.step()
        time.sleep(0.01)
    return True


def hold(engine: PaperEngine, names: list[str]) -> list[str]:
    """Sessions that ask and wait; their requests."""
    assert play(engine, lambda: engine.scheduler.running)
    asked = [
        engine.ask(text(LARGE, 100 + at), 1, session_id=name).request_id
        for at, name in enumerate(names)
    ]
    assert held_of(engine) == asked
    return asked


def explains_as_advised(engine: PaperEngine, session: str) -> bool:
    """Whether the command says what the engine was told last; agents may leave in between."""
    word = engine.side.client.admission()
    fit, live = word.fitting_sessions, word.live_sessions
    why = rf"why +│ held \d+ s: {fit:,} agents fit, {live:,} are live"
    return re.search(why, told("explain", session)) is not None


def told(*arguments: str) -> str:
    result = CliRunner().invoke(build_app(arguments[0]), [*arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.output


def test_people_and_programs_are_told_who_waits_and_why(engine: PaperEngine) -> None:
    asked = hold(engine, ["newcomer", "another"])
    assert play(engine, lambda: set(asked) == set(ask_sidecar()), 5.0)
    play(engine, lambda: False, 1.2)
    assert play(engine, lambda: "2, the first for" in told("status"), 5.0)
    status = told("status")
    assert "agents fit" in status
    assert "are live" in status
    assert play(engine, lambda: explains_as_advised(engine, "newcomer"), 10.0)
    assert f"Request {asked[0]} has not begun" in told("why", asked[0])
    assert "The next request of session newcomer has not begun: held " in told("why", "newcomer")
    for name in ("newcomer", "another", *asked):
        assert name not in status, "what needs no token names nobody"


def test_those_held_start_in_order_when_their_sidecar_dies(
    engine: PaperEngine, sidecar: SidecarProcess
) -> None:
    asked = hold(engine, ["a", "b", "c"])
    sidecar.kill()
    started: list[str] = []
    scheduled = engine.side.observer.request_scheduled
    engine.side.observer.request_scheduled = lambda request, *rest: (
        started.append(request.request_id),
        scheduled(request, *rest),
    )
    assert play(engine, lambda: all(name in started for name in asked), 8.0)
    assert [name for name in started if name in asked] == asked
    with pytest.raises(OSError, match="no sidecar"):
        ask_sidecar()
