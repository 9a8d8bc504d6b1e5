"""``make bench``: every bench runs, and one that fails makes it fail, by its name."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCHES = ["graph", "hotpath", "engine", "demo", "agents", "tiers", "kernels", "meaning"]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def make_bench(directory: Path, failing: list[str]) -> tuple[subprocess.CompletedProcess[str], str]:
    """Run the target with a stand-in for ``kvgraph`` that fails for some benches; also its log."""
    log, programs = directory / "log", directory / "bin"
    programs.mkdir()
    cases = "|".join(failing) or "none"
    scripts = {
        "kvgraph": f'echo "$@" >> {log}\ncase $2 in {cases}) exit 3;; esac',
        "pip": f'echo "pip $1" >> {log}',
    }
    for name, body in scripts.items():
        (programs / name).write_text(f"#!/bin/sh\n{body}\n")
        (programs / name).chmod(0o700)
    (directory / ".installed").touch()
    done = subprocess.run(
        ["make", "-C", str(ROOT), "bench", f"VENV={directory}", "JSON=1"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    return done, log.read_text()


@pytest.mark.parametrize("failing", [["hotpath"], ["graph", "demo"]])
def test_a_bench_that_fails_is_named_and_the_others_run(tmp_path: Path, failing: list[str]) -> None:
    done, log = make_bench(tmp_path, failing)
    assert done.returncode != 0
    assert f"make bench: failed: {' '.join(failing)}" in done.stderr
    assert all(f"bench {name} --json" in log for name in BENCHES)
