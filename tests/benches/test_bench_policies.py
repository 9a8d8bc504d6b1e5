"""`kvgraph bench policies`: what it plays, and what it makes of it."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from kvgraph.advisor.replay.recorded_sessions import Session, read_sessions
from kvgraph_bench.errors import BenchError
from kvgraph_bench.policies import policies
from kvgraph_bench.policies.policies_cells import NONSENSE, NONSENSE_ARM, Course, Journal
from rich.console import Console

TINY = policies.Scale(0.6, 4, (8,), (30, 60), (30, 60, 5000), (20,), (40,), 1.0)


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
        "mooncake_gap_inferred", "mooncake_gap_ends",
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


def test_missing_sessions_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="--sessions"):
        policies.run(False, tmp_path / "nowhere")


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
