"""Routers beside each other: figures are of the medians of all takes, ours over the best other."""

from __future__ import annotations

from typing import Any

from kvgraph.bench.figures import Figures
from kvgraph.bench.fleet.fleet_stage import OURS
from kvgraph.bench.fleet.routers.fleet_routers import add_takes


def arm(cached: int, p95: float) -> dict[str, Any]:
    return {"cached_tokens": cached, "prompt_tokens": 100, "failed": 0, "ttft_ms": {"95": p95}}


def test_one_lucky_take_does_not_count() -> None:
    takes = [
        {OURS: arm(60, 500.0), "round robin": arm(30, 400.0), "Ray's": arm(50, 900.0)},
        {OURS: arm(66, 400.0), "round robin": arm(99, 100.0), "Ray's": arm(55, 800.0)},
        {OURS: arm(10, 9e3), "round robin": arm(20, 500.0), "Ray's": arm(44, 700.0)},
    ]
    figures = Figures("fleet")
    add_takes(figures, takes)
    found = {name: each["value"] for name, each in figures.as_dict()["figures"].items()}
    assert found["cached_over_best_rival"] == 60 / 50
    assert found["ttft_p95_over_best_rival"] == 500 / 400
    assert found["rays_ttft_p95"] == 800
