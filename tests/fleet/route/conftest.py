"""Proxies before stand-ins for engines, all of which take requests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from kvgraph_bench.fleet.stand_in_engine import Routed, StandInEngine
from stand_ins import all_up


@pytest.fixture
async def fleet() -> AsyncIterator[Routed]:
    async with all_up(StandInEngine(), StandInEngine()) as two:
        yield two


@pytest.fixture
async def single() -> AsyncIterator[Routed]:
    async with all_up(StandInEngine()) as one:
        yield one
