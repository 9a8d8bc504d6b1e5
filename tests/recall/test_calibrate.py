"""What a calibration measures, and what it allows."""

from __future__ import annotations

import json
import os
import random
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kvgraph.graph.errors import ConfigError
from kvgraph.hooks.calibrate import app
from kvgraph.hooks.calibrate.trials import (
    MARGINS,
    TAIL,
    Cell,
    CellResult,
    PassMark,
    SplicedModel,
    grid,
    joined,
    judge,
    judge_margins,
    measure,
    part,
)
from kvgraph.hooks.recall.cover import SpliceLimits
from kvgraph.hooks.recall.gate import Calibration, calibration_file, load, save
from kvgraph.kernels.rope import rope_from_config
from typer.testing import CliRunner

GOOD, BAD = (0.01, 0.99), (0.5, 0.6)


def measured(cell: Cell, passes: bool) -> CellResult:
    kl, agreement = GOOD if passes else BAD
    return CellResult(cell, 100, kl, 1.0, agreement, 5.0, 6.0)


def table(bad: Callable[[Cell], bool] = lambda cell: False) -> list[CellResult]:
    """Cells that pass, but for bad ones."""
    cells = [Cell(tokens, distance, 1) for tokens in (32, 128, 512) for distance in (64, 256, 1024)]
    cells += [Cell(64, 256, joints) for joints in (2, 4, 8)]
    return [measured(cell, not bad(cell)) for cell in cells]


def test_what_passes_everywhere_is_allowed_as_far_as_it_was_measured() -> None:
    verdict = judge(table())
    assert verdict.passed
    limits = verdict.limits
    assert (limits.least_tokens, limits.most_distance, limits.most_joints) == (32, 1024, 8)


def test_what_fails_is_not_allowed() -> None:
    short = judge(table(lambda cell: cell.tokens < 128 and cell.joints == 1))
    assert (short.passed, short.limits.least_tokens) == (True, 128)
    assert judge(table(lambda cell: cell.distance > 256)).limits.most_distance == 256
    assert judge(table(lambda cell: cell.joints > 2)).limits.most_joints == 2
    nothing = judge(table(lambda cell: True))
    assert not nothing.passed
    assert "0.500 nats (allowed: 0.1), 60 % of the tokens" in nothing.reason
    assert not judge([]).passed
    assert judge(table(lambda cell: True), PassMark(1.0, 0.5)).passed, "by the caller's own bar"


def all_but(bad: Callable[[Cell], bool], furthest: int = 1024) -> SpliceLimits:
    """What is allowed where all that is measured passes but ``bad`` cells."""
    verdict = judge([
        measured(cell, not bad(cell)) for cell in grid(1 << 16, furthest=furthest)
    ])  # fmt: skip
    assert verdict.passed
    return verdict.limits


def test_what_is_allowed_is_allowed_together() -> None:
    """Many joints, and much that was spliced before, as far as text may come from."""
    assert all_but(lambda cell: False) == SpliceLimits(32, 1024, 8, 8, 4, 1024, True)
    assert all_but(lambda cell: cell.joints == 8 and cell.distance == 1024).most_joints == 4
    assert all_but(lambda cell: cell.generations == 4 and cell.distance > 256).most_generations == 2
    near = all_but(lambda cell: cell.distance == 1024)
    assert (near.most_distance, near.most_joints, near.most_generations) == (256, 8, 4)
    assert all_but(lambda cell: False, furthest=16_384).most_distance == 16_384


def test_text_moves_towards_the_end_as_far_as_that_was_measured() -> None:
    limits = all_but(lambda cell: cell.later and cell.distance > 64 and not cell.opening)
    assert (limits.most_distance, limits.most_later) == (1024, 64)
    assert limits.allow(500, -1024)
    assert limits.allow(500, 64)
    assert not limits.allow(500, 65)
    assert all_but(lambda cell: cell.later).most_later == 0


def test_text_that_opened_its_prompt_moves_only_where_that_passed() -> None:
    limits = all_but(lambda cell: cell.opening)
    assert (limits.openings, limits.most_later) == (False, 1024)
    assert not limits.allow(0, 64)
    assert limits.allow(1, 64)
    assert limits.allow(0, 0)


def test_a_longer_margin_is_tried_and_kept_where_a_short_one_fails() -> None:
    seen: list[Cell] = []

    def measure(cell: Cell) -> CellResult:
        seen.append(cell)
        return measured(cell, cell.margin >= MARGINS[1])

    verdict, shown = judge_margins([grid(2048, margin=margin) for margin in MARGINS], measure)
    assert verdict.passed
    assert verdict.limits.margin == MARGINS[1]
    assert {cell.margin for cell in seen} == set(MARGINS[:2])
    assert len(shown) == len(seen)
    assert "the last 32 tokens computed" in verdict.reason


def test_a_model_too_short_for_a_longer_margin_is_refused_by_what_was_measured() -> None:
    grids = [grid(200, margin=margin) for margin in MARGINS]
    assert grids[0]
    assert not grids[-1]
    verdict, shown = judge_margins(grids, lambda cell: measured(cell, False))
    assert not verdict.passed
    assert shown
    assert "0.500 nats" in verdict.reason


def drawn(seed: int) -> Callable[[int], Any]:
    """Draws texts of so many tokens."""
    rng = random.Random(seed)
    return lambda count: torch.tensor([rng.randrange(3, 300) for _ in range(count)])


def test_the_margin_is_computed_behind_what_is_spliced(small: SplicedModel) -> None:
    """All of the span in the margin but its first tokens: nearly nothing is left to differ."""
    text = drawn(6)
    assert measure(small, Cell(64, 64, margin=0), 2, text).n == 2 * TAIL
    short, long = (measure(small, Cell(4, 64, margin=margin), 6, text).kl for margin in (0, 200))
    assert long < short


def test_a_model_that_takes_only_short_sequences_is_measured_on_short_ones() -> None:
    assert {cell.tokens for cell in grid(300)} == {32, 128}
    assert all(cell.longest <= 512 for cell in grid(512))
    assert grid(100) == []


@pytest.fixture(scope="module")
def small() -> SplicedModel:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048,
        rope_theta=10_000.0, initializer_range=0.2,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(4)
        model = LlamaForCausalLM(config).eval()
    return SplicedModel(model, rope_from_config(config, 2048))


def ids(count: int, seed: int) -> Any:
    return torch.randint(3, 300, (count,), generator=torch.Generator().manual_seed(seed))


def test_what_is_moved_with_all_before_it_says_the_same(small: SplicedModel) -> None:
    """A sequence as a whole, at other positions: attention only sees distances."""
    text, tail = ids(90, 1), ids(20, 2)
    there = small.states(torch.cat([text, tail]), 50)
    moved = small.moved(small.states(torch.cat([text, tail])), 50)
    for (got, _), (wanted, _) in zip(moved, there, strict=True):
        assert torch.allclose(got, wanted, atol=1e-4)


def test_reading_the_own_states_again_changes_nothing(small: SplicedModel) -> None:
    text, tail = ids(90, 1), ids(20, 2)
    truth = small.logits(torch.cat([text, tail]))[-20:]
    states = small.states(text)
    again = small.logits(tail, joined([part(states, 0, 40), part(states, 40, 90)]))
    assert torch.allclose(again, truth, atol=1e-4)


def test_keys_that_turn_otherwise_than_the_configuration_says_are_noticed(
    small: SplicedModel,
) -> None:
    small.check_rotation(ids(64, 3))
    for wrong in (small.rope.inv_freq * 1.1, torch.zeros_like(small.rope.inv_freq)):
        other = SplicedModel(small.model, replace(small.rope, inv_freq=wrong))
        with pytest.raises(ConfigError, match="keys of layer 0 do not rotate"):
            other.check_rotation(ids(64, 3))


def test_a_splice_is_measured_beside_a_wrong_one_and_none(small: SplicedModel) -> None:
    text = drawn(5)
    plain = measure(small, Cell(64, 64), 2, text)
    assert plain.n == 2 * 24
    assert 0 < plain.kl < plain.without_kl
    assert 0 <= plain.agreement <= 1
    assert measure(small, Cell(64, 64, int8=True), 2, text).kl > 0


@pytest.mark.large  # four calibrations of some fifteen seconds
def test_the_command_keeps_what_engines_look_for(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvgraph.hooks.vllm.recall.support import model_identity
    from vllm.config import ModelConfig

    monkeypatch.setenv("AITHER_KVCACHE_CALIBRATIONS", str(tmp_path))
    quick = [str(tiny_model), "--quick", "--samples", "1", "--max-model-len", "512"]
    arguments = [*quick, "--json"]
    runner = CliRunner()
    strict = runner.invoke(app, [*arguments, "--most-kl", "0"])
    assert strict.exit_code == 1
    told = json.loads(strict.stdout)
    assert not told["passed"]
    assert "random tokens" in told["text"]
    lax = runner.invoke(app, [*arguments, "--most-kl", "99", "--least-agreement", "0"])
    assert lax.exit_code == 0
    told = json.loads(lax.stdout)
    assert told["identity"] == model_identity(ModelConfig(str(tiny_model), max_model_len=512), 512)
    kept = load(told["identity"], calibration_file(told["identity"]))
    assert (kept.passed, kept.limits.least_tokens) == (True, 32)
    again = runner.invoke(app, [*quick, "--most-kl", "99", "--least-agreement", "0"])
    assert "The bar is below the default's" in again.stdout
    assert len(kept.cells) == len(told["cells"]) >= 5
    shown = runner.invoke(app, [*quick, "--most-kl", "0"])
    assert "FAILED" in shown.stdout
    assert "engines splice nothing" in shown.stdout
    wide = [line for line in shown.stdout.splitlines() if line.rstrip().endswith((" no", " yes"))]
    assert len(wide) >= 5
    assert all(len(line.rstrip()) <= 80 and "…" not in line for line in wide)


def test_a_model_that_is_not_there_is_told_in_one_line() -> None:
    ended = CliRunner().invoke(app, ["/nowhere/model"])
    assert "there is no directory /nowhere/model" in ended.output
    assert ended.exit_code == 1
    assert "Traceback" not in ended.output


def test_a_calibration_is_read_as_it_was_written(tmp_path: Path) -> None:
    calibration = Calibration("m", "id", True, "why", SpliceLimits(64, 128, 2, 9), ({"kl": 1.0},))
    save(calibration, tmp_path / "deep" / "c.json")
    read = load("id", tmp_path / "deep" / "c.json")
    assert replace(read, cells=calibration.cells) == calibration
    assert list(read.cells) == [{"kl": 1.0}]
    with pytest.raises(ConfigError, match="run `kvgraph calibrate MODEL`"):
        load("id", tmp_path / "none.json")


def test_a_pipe_in_the_place_of_a_calibration_holds_no_engine_up(tmp_path: Path) -> None:
    pipe = tmp_path / "c.json"
    os.mkfifo(pipe)
    opened = partial(os.open, pipe, os.O_RDWR | os.O_NONBLOCK)
    late = threading.Timer(3.0, lambda: os.close(opened()))  # or a reader would wait for ever
    late.start()
    with pytest.raises(ConfigError, match="is no regular file"):
        load("id", pipe)
    assert late.is_alive(), "nobody waited for it"
    late.cancel()
