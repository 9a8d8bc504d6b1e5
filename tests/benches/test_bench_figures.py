"""What every bench reports, and where it keeps that."""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from kvgraph_bench.cli import app
from kvgraph_bench.figures import Figure, Figures, at_least, keep_raw
from kvgraph_bench.steps.scheduler_steps import EMPTY, Busy, measure_arms, measure_client
from kvgraph_bench.steps.step_loop import Load
from typer.testing import CliRunner

pytestmark = pytest.mark.usefixtures("vllm_loaded")


@pytest.mark.parametrize(
    ("value", "target", "missed"),
    [
        (201.0, "≤ 200", True),
        (200.0, "≤ 200", False),
        (999_999.0, "≥ 1,000,000", True),
        (0.35, "≥ .36", True),
        (-0.3, "≥ -0.2", True),
        (1, "0", True),
        (0, "0", False),
        (1.0, "< 1", True),
        (0.1, "> 0", False),
        (False, "true", True),
        (float("nan"), "≤ 200", True),
        (5.0, "≤ 1 either way", False),  # words
        (5.0, "", False),
    ],
)
def test_a_value_beyond_its_bound_is_a_miss(value: float, target: str, missed: bool) -> None:
    assert Figure.of(value, "ms", target).is_missed is missed


@pytest.mark.parametrize("bench", ["engine", "fleet"])
def test_a_raw_file_that_cannot_be_written_is_refused_at_once(bench: str, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "no" / "raw.json"):
        done = CliRunner().invoke(app, [bench, "--raw", str(path)], env={"COLUMNS": "300"})
        assert done.exit_code == 2
        assert f"{path} cannot be written" in done.output


def test_what_was_measured_outlives_a_raw_file_that_went_away(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep_raw(tmp_path / "raw.json", {"value": 1})
    assert json.loads((tmp_path / "raw.json").read_text()) == {"value": 1}
    keep_raw(tmp_path, {"value": 1})
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("bound", [100 * 227 / 228, 55 / 60, 100.0])
def test_what_equals_a_bound_is_no_miss(bound: float) -> None:
    assert not Figure.of(bound, "%", at_least(bound)).is_missed
    assert Figure.of(bound - 0.11, "%", at_least(bound)).is_missed


def test_counts_are_shown_with_all_their_digits(capsys: pytest.CaptureFixture[str]) -> None:
    figures = Figures("some")
    figures.add("sessions", 100_000, "sessions")
    figures.add("rates", [12_345.6, 0.123456, 9999.4], "tok/s")
    figures.print()
    shown = capsys.readouterr().out
    assert "100,000 sessions" in shown
    assert "0.1235 – 12,346" in shown
    assert "9,999 tok/s" in shown


def test_a_figure_is_the_median_with_its_spread() -> None:
    figure = Figure.of([3.0, 1.0, 2.0], "ms")
    assert (figure.value, figure.spread, figure.n) == (2.0, (1.0, 3.0), 3)
    wide = Figure.of([float(i) for i in range(101)], "ms")
    assert wide.spread == (10.0, 90.0)


@pytest.mark.parametrize(
    "words",
    [["replay", "--trace", "nowhere"], ["faults", "gremlins"], ["faults", "mends", "--only", "?"]],
)
def test_an_input_that_is_not_there_ends_with_2(words: list[str]) -> None:
    """As commands outside the benches end: there is no use in trying again."""
    assert CliRunner().invoke(app, words).exit_code == 2


@pytest.mark.parametrize("bench", ["hotpath", "meaning", "fleet", "recall"])
def test_a_part_that_is_not_there_is_refused_by_name(bench: str) -> None:
    done = CliRunner().invoke(app, [bench, "--part", "step"], env={"COLUMNS": "300"})
    assert done.exit_code == 2
    assert "'step'; allowed: all, " in done.output


@pytest.mark.parametrize(
    "words",
    [
        ["agents", "--best", "16"],
        ["agents", "--closed", "--requests", "60"],
        ["agents", "--closed", "--stock", ".5"],
        ["agents", "--closed", "--paper", "--pairs", "2"],
        ["agents", "--open", "--arms", "hints"],
        ["tiers", "--pairs", "0"],
        ["confkv", "--length", "255"],
    ],
)
def test_an_option_that_would_do_nothing_is_refused(words: list[str]) -> None:
    done = CliRunner().invoke(app, words, env={"COLUMNS": "300"})
    assert done.exit_code == 2
    assert words[-2] in done.output


MEASURED = {
    "graph": "graph.graph", "sidecar": "sidecars.sidecar_bench", "hotpath": "hotpath",
    "replay": "replay", "meaning": "meaning.meaning", "confkv": "confkv.confkv",
    "fleet": "fleet.fleet_bench", "recall": "recall.recall_bench", "kernels": "kernels.kernels",
}  # fmt: skip


@pytest.mark.parametrize("command", MEASURED)
def test_a_command_runs_its_bench_with_options_that_it_takes(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = importlib.import_module(f"kvgraph_bench.{MEASURED[command]}")
    takes = inspect.signature(bench.run)

    def run(**options: Any) -> Figures:
        takes.bind(**options)
        return Figures(command)

    monkeypatch.setattr(bench, "run", run)
    done = CliRunner().invoke(app, [command, "--json"])
    assert (done.exit_code, json.loads(done.stdout)["bench"]) == (0, command), done.output


@pytest.mark.usefixtures("paper_config")  # which makes the model's configuration
def test_arms_take_turns_and_each_is_measured() -> None:
    arms = [EMPTY, "observed python", "tiers python"]
    took = measure_arms(Busy(2, 200), arms, rounds=2)
    assert list(took) == arms
    assert all(len(samples) == 2 and min(samples) > 0 for samples in took.values())


def test_the_client_is_measured_once_a_tick() -> None:
    took = measure_client(Load(4, 1_000), "python", steps=28)
    assert len(took) == 4
    assert min(took) > 0


def test_a_share_of_nothing_has_no_interval_below_zero() -> None:
    figures = Figures("x")
    figures.add_share("none", 0, 3, "of 3")
    assert figures.figures["none"].unit == "of 3, 0.000 – 0.561"
