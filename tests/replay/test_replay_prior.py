"""The prior: learned from recorded sessions by a command, and shipped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from kvgraph.advisor.cli import build_app
from kvgraph.advisor.policies.hazard import AGES
from kvgraph.advisor.policies.lifecycle import Returns, load_prior
from kvgraph.advisor.policies.waits import FEATURES, STATED_FEATURE
from kvgraph.advisor.replay.prior import learn_prior, recorded_waits
from kvgraph.advisor.replay.recordings import read_sessions
from typer.testing import CliRunner


def turn(at: float, blocks: list[int], stop: str = "tool_use", out: int = 100) -> dict[str, Any]:
    return {"t": at, "type": "n", "in": 64 * len(blocks), "out": out, "hash_ids": blocks,
            "stop": stop}  # fmt: skip


def write(directory: Path, name: str, requests: list[dict[str, Any]]) -> None:
    session = {"block_size": 64, "tool_tokens": 0, "system_tokens": 0, "requests": requests}
    (directory / f"{name}.json").write_text(json.dumps(session))


def recorded(directory: Path, seed: int = 1, sessions: int = 20) -> None:
    rng = np.random.default_rng(seed)
    for number in range(sessions):
        at, requests = 0.0, []
        for count in range(4, 24):
            requests.append(turn(at, list(range(1, count))))
            at += float(rng.exponential(20.0))
        write(directory, f"s{number}", requests)


def test_a_context_that_nobody_extends_is_waited_for_in_vain(tmp_path: Path) -> None:
    """A compaction ends the wait of the blocks before it, although the session goes on."""
    chain = list(range(1, 20))
    write(tmp_path, "s", [turn(0, chain), turn(10, [*chain, 20]), turn(30, [1, 2, 50, 51])])
    waits = recorded_waits(read_sessions(tmp_path))
    assert waits.age.tolist() == [10.0, 3600.0, 3600.0]
    assert waits.returned.tolist() == [True, False, False]
    assert waits.features.shape == (3, len(FEATURES))
    told = np.exp(waits.features[0, STATED_FEATURE])
    assert 10.0 / 4 <= told <= 10.0 * 4
    assert np.isnan(waits.features[1:, STATED_FEATURE]).all()


def test_the_same_sessions_teach_the_same(tmp_path: Path) -> None:
    recorded(tmp_path)
    sessions = read_sessions(tmp_path)
    one, other = (learn_prior(sessions, steps=60) for _ in range(2))
    assert one.pause == other.pause
    for a, b in zip(one.weights, other.weights, strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_command_writes_what_a_policy_starts_from(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("kvgraph.advisor.replay.prior.STEPS", 60)
    recorded(tmp_path, sessions=3)
    out = tmp_path / "prior.npz"
    result = CliRunner().invoke(build_app("prior"), ["prior", str(tmp_path), "-o", str(out)])
    assert result.exit_code == 0, result.output
    with np.load(out) as arrays:
        assert set(arrays) == {"scales", "pause", "into", "bias", "across", "offset", "out", "base"}


def test_the_shipped_prior_fits_the_features() -> None:
    prior = load_prior()
    assert prior.scales.shape == (2, len(FEATURES))
    rates = np.interp([1.0, 60.0, 3000.0], AGES, Returns(prior).stranger_rates())
    assert (np.diff(rates) < 0).all(), "who was away longer is less likely to come back soon"
