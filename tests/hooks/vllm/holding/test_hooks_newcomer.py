"""A prompt of half the pool starts in time beside small sessions that keep the pool full."""

from __future__ import annotations

from typing import Any

from kvgraph.graph.wire.advice import HOLD_MAX_S
from kvgraph_bench.closed.on_paper.newcomer import play_newcomers
from kvgraph_bench.serving.model import ModelShape


def test_a_large_newcomer_waits_no_longer_than_three_times_as_long_as_small_ones(
    paper_config: Any,
) -> None:
    runs = play_newcomers(paper_config, ModelShape().vocab, seed=2, measured_s=500.0, crowds=(32,))
    held = [run for run in runs if run.arm == "hold"]
    (run,) = held
    assert len(run.newcomers) >= 2
    assert max(run.newcomers) <= HOLD_MAX_S
    assert run.ratio <= 3.0
