"""`kvgraph bench policies`: what it plays, and what it makes of it."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvgraph.advisor.replay.closed_arms import ClosedRow
from kvgraph.advisor.replay.fleet_traffic import Signals
from kvgraph.advisor.replay.recordings import Session, read_sessions
from kvgraph.advisor.replay.trace import Trace
from kvgraph.bench.errors import BenchError
from kvgraph.bench.policies import policies
from kvgraph.bench.policies.policies_cells import NONSENSE_ARM, Cell, Rates, hit_rate, play
from kvgraph.bench.policies.policies_course import Course
from kvgraph.bench.policies.policies_fleets import FAST, faster, fleet, halves
from kvgraph.bench.policies.policies_journal import Journal, fingerprint
from kvgraph.bench.policies.policies_loop import ADMITTED, PLAIN_TIER, TIERED, LoopScale, cliff
from kvgraph.bench.policies.policies_nonsense import NONSENSE
from rich.console import Console

LOOP = LoopScale({20: (1, 2)}, {20: (1, 3)}, 0.2, 0.1)
TINY = policies.Scale(0.6, 4, (8,), (30, 60), (30, 60, 5000), (20,), (40,), 1.0, LOOP)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sessions that grow by a block of 512 tokens every 20 s, with a pause in the middle."""
    directory = tmp_path_factory.mktemp("sessions")
    for number in range(8):
        requests = [
            {"t": 20.0 * i + (300 if i > 6 else 0), "type": "n", "in": 2048 + 512 * i, "out": 90,
             "hash_ids": list(range(32 + 8 * i)), "stop": "tool_use", "api_time": 3.0}
            for i in range(8 + number)
        ]  # fmt: skip
        head = {"block_size": 64, "tool_tokens": 512, "system_tokens": 512}
        (directory / f"s{number}.json").write_text(json.dumps({**head, "requests": requests}))
    return directory


@pytest.fixture(scope="module")
def sessions(recorded: Path) -> list[Session]:
    return read_sessions(recorded)


@pytest.fixture(scope="module")
def small(sessions: list[Session]) -> Trace:
    return fleet("small", sessions, 4, 0.6, Signals.ALL)


def mooncake(path: Path) -> Path:
    chains = [[i % 7, 100 + i % 7, 200 + i] for i in range(60)]
    rows = [
        {"timestamp": 900 * i, "input_length": 1536, "output_length": 5, "hash_ids": chain}
        for i, chain in enumerate(chains)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_every_figure_is_measured_and_every_rate_saved(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policies, "QUICK", TINY)
    raw = tmp_path / "raw.json"
    trace = mooncake(tmp_path / "m.jsonl")
    journal = tmp_path / "deep" / "journal.jsonl"
    found = policies.run(
        False, recorded, trace, quick=True, processes=1, raw=raw, journal=journal
    ).figures
    assert list(found) == [
        "gap_inferred", "gap_inferred_least", "gap_stops", "told_share", "told_layers_share",
        "layers_alone_points", "protection_price_error_points", "hostile_layers_points",
        "worst_points_vs_lru", "fast_clock_gap", "nonsense_points",
        "mooncake_gap_inferred", "mooncake_gap_ends", "lab_turns_ratio_over",
        "lab_agents_before_cliff_ratio", "lab_turns_ratio_lpm", "lab_turns_ratio_under",
        "lab_held_under", "lab_turns_ratio_over_host", "lab_turns_ratio_over_host_without",
        "lab_longest_hold_s", "lab_starved",
    ]  # fmt: skip
    assert found["gap_inferred"].n == 2
    assert found["gap_inferred_least"].value == found["gap_inferred"].spread[0]
    saved: dict[str, Any] = json.loads(raw.read_text())
    assert saved["requests"]["4 users A"] > 0
    rates = saved["rates"]
    assert set(rates["4 users A, stops"]) == {"lru", "belady", "default+hints"}
    assert {NONSENSE_ARM + name for name in NONSENSE} <= set(rates["4 users A"])
    assert "default" in rates["8 users"]
    plain = [
        100 * (rate - row["lru"][capacity])
        for row in rates.values()
        for capacity, rate in row.get("default", {}).items()
    ]
    assert found["worst_points_vs_lru"].value == pytest.approx(min(plain), abs=1e-3)
    assert {row["arm"] for row in saved["loops"]} == {
        "lru", "lpm", ADMITTED, PLAIN_TIER, TIERED,
    }  # fmt: skip


def test_a_cliff_is_where_an_arm_first_computes_too_much() -> None:
    shares = {10: 0.1, 12: 0.2, 14: 0.6, 16: 0.2}
    rows = [
        ClosedRow("lru", 5, n, 1, 1, share, 0, 0, 0, 0, 0, 0, 0, 0) for n, share in shares.items()
    ]
    assert cliff(rows, "lru", 5) == 12
    assert cliff(rows[2:], "lru", 5) == 14, "the first rung, where none stands"


def test_capacities_where_lru_finds_next_to_nothing_are_left_out(small: Trace) -> None:
    assert policies.standing_among(small, [5, 60]) == [60]
    assert policies.standing_among(small, [5, 60], always=(5,)) == [5, 60]


def test_missing_sessions_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="--sessions"):
        policies.run(False, tmp_path / "nowhere")


def test_a_missing_trace_is_one_sentence(recorded: Path, tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="--mooncake"):
        policies.run(False, recorded, tmp_path / "nowhere", quick=True)


def one_cell(shared: list[int], cell: tuple[str, int]) -> float:
    shared.append(cell[1])
    return cell[1] / 8


def course(
    path: Path, of: str = "this", resume: bool = False, to: StringIO | None = None
) -> Course:
    console = Console(file=to, width=200) if to else Console(quiet=True)
    return Course(Journal(path, of, resume), 1, console)


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    path, played = tmp_path / "journal.jsonl", list[int]()
    cells = [("a", number) for number in range(4)]
    course(path).play("kind", one_cell, played, cells[:2])
    with path.open("a") as journal:
        journal.write('{"cell": "[\\"kind\\", \\"a\\", 2')  # killed while it wrote
    found = course(path, resume=True).play("kind", one_cell, played, cells)
    assert played == [0, 1, 2, 3]
    assert found == {cell: cell[1] / 8 for cell in cells}
    again = course(path, resume=True)
    assert again.play("kind", one_cell, played, cells) == found
    assert len(played) == 4
    again.play("another", one_cell, played, cells[:1])
    course(path).play("kind", one_cell, played, cells[:1])
    assert len(played) == 6, "without --resume everything is played"


def test_a_journal_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    course(path)
    with pytest.raises(BenchError, match="--resume"):
        course(path, of="that", resume=True)
    path.write_text("no journal\n")
    with pytest.raises(BenchError, match="no journal"):
        course(path, resume=True)
    with pytest.raises(BenchError, match="cannot be written"):
        course(tmp_path)


def test_a_journal_is_of_its_traffic(small: Trace) -> None:
    own = fingerprint({"t": small})
    assert own == fingerprint({"t": small})
    assert own != fingerprint({"t": small.unnamed()})
    assert own != fingerprint({"t": faster(small, FAST)})
    assert own != fingerprint({"t": small}, "another scale")


def test_each_result_and_the_time_that_is_left_are_said(tmp_path: Path) -> None:
    said = StringIO()
    course(tmp_path / "j", to=said).play("kind", one_cell, [], [("a", 2), ("b", 4)])
    first, second = said.getvalue().splitlines()
    assert "50%" in first
    assert "left" in first
    assert first.endswith("done: a 2: 0.2500")
    assert "100%" in second


def test_halves_share_no_session(sessions: list[Session]) -> None:
    one, other = ({session.name for session in half} for half in halves(sessions))
    assert not one & other
    assert len(one | other) == len(sessions)
    assert halves(sessions) == halves(sessions[::-1])


def test_a_faster_fleet_is_the_same_fleet(small: Trace) -> None:
    fast = faster(small, FAST)
    assert fast.at[-1] * FAST == pytest.approx(small.at[-1])
    assert small.said is not None
    assert fast.said is not None
    assert np.nanmax(fast.said.expected_return_s) * FAST == pytest.approx(
        np.nanmax(small.said.expected_return_s)
    )
    lru = [hit_rate({"t": trace}, Cell("t", "lru", 60)) for trace in (small, fast)]
    assert lru[0] == lru[1]


def test_gaps_and_points() -> None:
    rates = Rates({
        Cell("t", arm, capacity): rate
        for capacity, row in {10: (0.2, 0.3, 0.6), 20: (0.5, 0.45, 0.7)}.items()
        for arm, rate in zip(("lru", "default", "belady"), row, strict=True)
    })  # fmt: skip
    assert rates.points(Cell("t", "default", 20)) == pytest.approx(-5.0)
    assert rates.gap("t", "default", [10]) == pytest.approx(0.25)
    assert rates.gap("t", "default", [10, 20]) == pytest.approx(0.0)


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_is_played_to_the_end(small: Trace, name: str) -> None:
    cell = Cell("small", NONSENSE_ARM + name, 60)
    rate = hit_rate({"small": small}, cell)
    assert 0.0 <= rate <= 1.0
    assert rate == hit_rate({"small": small}, cell), "the same numbers every time"


def test_each_cell_is_played_once_beside_its_bounds(small: Trace, tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", "this", resume=False)
    cells = [Cell("small", "classic", 60)] * 2
    rates = play({"small": small}, cells, Course(journal, 1, Console(quiet=True)))
    assert {cell.arm for cell in rates.rates} == {"classic", "lru", "belady"}
    assert len(journal) == 3
