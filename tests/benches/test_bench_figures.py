"""What every bench reports, and where it keeps that."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from kvgraph.bench.cli import app
from kvgraph.bench.engine.engine import Part, run
from kvgraph.bench.figures import Figure, Figures
from kvgraph.bench.machine import keep_raw
from rich.console import Console
from typer.testing import CliRunner


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
        (-0.052, "within ± 0.05", True),
        (-0.048, "within ± 0.05", False),
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


def test_a_miss_is_told_and_targets_are_kept() -> None:
    figures = Figures("hotpath")
    figures.add("step_us_500", 231.3, "us", "≤ 200")
    figures.add("step_us_32", 47.0, "us")
    written = io.StringIO()
    figures.print(console=Console(file=written, width=100))
    assert "≤ 200: missed" in written.getvalue()
    kept = figures.as_dict()["figures"]
    assert kept["step_us_500"]["target"] == "≤ 200"
    assert "target" not in kept["step_us_32"]


@pytest.mark.parametrize("bench", ["engine", "policies", "fleet"])
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


def test_a_bench_interrupted_before_its_first_measurement_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvgraph.bench.engine.engine.sidecar_cpu_percent", interrupted)
    assert run(part=Part.SIDECAR).figures["complete"].value is False
    assert "nothing was measured yet" in capsys.readouterr().err
