"""Stages that run in a network of their own: what they find comes back, and why they broke."""

from __future__ import annotations

import importlib

import pytest
from kvgraph.bench.errors import BenchError
from kvgraph.bench.fleet.kills import fleet_kills
from kvgraph.bench.fleet.processes.apart import has_networks, run_apart
from kvgraph.bench.fleet.routers import fleet_routers


@pytest.mark.parametrize("stage", [fleet_kills.STAGE, fleet_routers.STAGE])
def test_every_stage_can_be_played(stage: str) -> None:
    assert callable(importlib.import_module(stage).play)


@pytest.mark.skipif(not has_networks(), reason="no process gets a network of its own here")
def test_a_stage_that_cannot_be_played_says_why() -> None:
    with pytest.raises(BenchError, match=r"(?s)json broke.*no attribute 'play'"):
        run_apart("json", "nothing", print, 60)
