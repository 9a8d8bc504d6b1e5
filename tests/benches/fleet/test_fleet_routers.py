"""Routers on real engines: ours over each take's best other; and before stock ones."""

from __future__ import annotations

from typing import Any

import pytest
from kvgraph_bench.figures import Figures
from kvgraph_bench.fleet import fleet_stock
from kvgraph_bench.fleet.fleet_routers import add_takes
from kvgraph_bench.fleet.fleet_stage import OURS
from kvgraph_bench.fleet.fleet_stock import StockFleet, add_stock_engines


def arm(cached: int, p95: float) -> dict[str, Any]:
    return {"cached_tokens": cached, "prompt_tokens": 100, "failed": 0, "ttft_ms": {"95": p95}}


def test_one_lucky_fleet_does_not_count() -> None:
    takes = [
        {OURS: arm(60, 500.0), "round robin": arm(30, 400.0), "Ray's": arm(50, 900.0)},
        {OURS: arm(99, 100.0), "round robin": arm(66, 400.0), "Ray's": arm(55, 800.0)},
        {OURS: arm(10, 9e3), "round robin": arm(20, 500.0), "Ray's": arm(44, 700.0)},
    ]
    figures = Figures("fleet")
    add_takes(figures, takes)
    found = {name: each["value"] for name, each in figures.as_dict()["figures"].items()}
    assert found["cached_over_best_rival"] == 60 / 50
    assert found["ttft_p95_over_best_rival"] == 500 / 400
    assert found["rays_ttft_p95"] == 800


def test_before_stock_engines_ours_finds_more_whether_sessions_are_named_or_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fleet_stock, "FLEETS", (StockFleet(25, 1.0, 4, 250, 0),))
    figures, said = Figures("fleet"), list[str]()
    add_stock_engines(figures, said.append)
    for name in ("stock_engines_points", "stock_engines_points_nothing_said"):
        assert figures.as_dict()["figures"][name]["value"] > 1.0
    assert len(said) == 1
