"""The router before engines without kvgraph finds more than cache-aware routing, also unnamed."""

from __future__ import annotations

import pytest
from kvgraph.bench.figures import Figures
from kvgraph.bench.fleet import fleet_stock
from kvgraph.bench.fleet.fleet_stock import StockFleet, add_stock_engines
from kvgraph.bench.recorded.agents_fleet import SESSIONS


def test_it_finds_more_whether_sessions_are_named_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_stock, "FLEETS", (StockFleet(25, 1.0, 4, 250, 0),))
    monkeypatch.setattr(fleet_stock, "default_sessions", lambda: SESSIONS)
    figures, said = Figures("fleet"), list[str]()
    add_stock_engines(figures, said.append)
    for name in ("stock_engines_points", "stock_engines_points_nothing_said"):
        assert figures.as_dict()["figures"][name]["value"] > 1.0
    assert len(said) == 1
