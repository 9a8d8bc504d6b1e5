"""The faults of ``kvgraph bench faults``, in short: each runs, and finds what it looks for."""

from __future__ import annotations

import importlib
import json
import random
from pathlib import Path

import numpy as np
import pytest
from kvgraph.bench import faults_churn
from kvgraph.bench.errors import BenchError
from kvgraph.bench.faults import FAULTS, Fault, Say, Size, run
from kvgraph.bench.faults_burst import burst
from kvgraph.bench.faults_churn import churn
from kvgraph.bench.faults_kills import resync_times
from kvgraph.bench.faults_load import SHARES, lose
from kvgraph.bench.faults_mutants import apply_mutants
from kvgraph.bench.faults_snapshots import bad_loads_of_damage, bad_loads_of_kills
from kvgraph.bench.figures import Figures


def test_typed_mutants_harm_no_graph() -> None:
    seed = random.randrange(1 << 30)
    done = apply_mutants(seed, 6_000)
    assert done["crashes"] == 0, f"seed {seed}"
    assert done["applied"] > 1_000, "a quarter still decodes: what it means is checked, too"
    assert done["unknown"] > 0


@pytest.mark.parametrize("share", SHARES)
def test_every_lost_batch_is_noticed_and_made_good(socket_directory: Path, share: float) -> None:
    seed = random.randrange(1 << 30)
    loss = lose(socket_directory, share, 4.0, seed)
    assert loss.gaps == loss.holes, f"seed {seed}"
    assert loss.in_step, f"seed {seed}"
    assert loss.holes > 0 or share < 0.01


def test_a_burst_costs_an_engine_nothing_and_is_caught_up_with(socket_directory: Path) -> None:
    waits, took, _ = burst(socket_directory, 1.0)
    assert took is not None
    assert float(np.median(waits)) < 1e-3


def test_a_killed_sidecar_is_in_step_again(socket_directory: Path) -> None:
    seed = random.randrange(1 << 30)
    assert None not in resync_times(socket_directory, 2, seed, lambda _: None), f"seed {seed}"


def test_a_writer_that_is_killed_leaves_a_whole_snapshot(tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    bad, _ = bad_loads_of_kills(tmp_path, 4, seed, lambda _: None)
    assert bad == 0, f"seed {seed}"
    assert bad_loads_of_damage(tmp_path, 40, seed) == 0, f"seed {seed}"


def test_churn_goes_through_a_graph_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults_churn, "RESIDENT", 2000)
    monkeypatch.setattr(faults_churn, "GHOSTS", 2000)
    monkeypatch.setattr(faults_churn, "SESSIONS", 300)
    _, series, blocks, sessions = churn(2000)
    assert blocks <= 4500
    assert sessions <= 300
    assert series <= 2000


def test_faults_run_by_name_and_are_kept_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[str] = []

    def fault(name: str) -> Fault:
        def run(figures: Figures, size: Size, say: Say) -> None:
            runs.append(f"{name} {size.of(1, 2)} {size.seed}")
            figures.add(f"{name}_figure", 7, "")

        return run

    modules = {f"kvgraph.bench.{module}": fault(name) for name, module in FAULTS.items()}
    for module, run_it in modules.items():
        monkeypatch.setattr(importlib.import_module(module), "run", run_it)
    figures = run(["burst"], False, 5, tmp_path, progress=False)
    assert runs == ["burst 1 5"]
    assert list(figures.figures) == ["burst_figure"]
    assert json.loads((tmp_path / "burst.json").read_text())["figures"]["burst_figure"]["n"] == 1
    run(["http"], True, 5, tmp_path, progress=False)
    everything = run([], True, 5, tmp_path, progress=False)
    assert set(everything.figures) == {f"{name}_figure" for name in FAULTS}, "kept ones too"
    full = [each.split()[0] for each in runs[2:]]
    assert full == [name for name in FAULTS if name != "http"], "a short result is no full one"
    with pytest.raises(BenchError, match=r"no fault is called gremlins; there are mutants, losses"):
        run(["gremlins"], False, 5, tmp_path, progress=False)
