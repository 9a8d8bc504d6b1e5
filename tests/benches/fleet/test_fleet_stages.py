"""Stages that run in a network of their own: what they find comes back, and why they broke."""

from __future__ import annotations

import importlib

import pytest
from kvgraph_bench.fleet import fleet_kills, fleet_routers


@pytest.mark.parametrize("stage", [fleet_kills.STAGE, fleet_routers.STAGE])
def test_every_stage_can_be_played(stage: str) -> None:
    assert callable(importlib.import_module(stage).play)
