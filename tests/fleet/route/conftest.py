"""Proxies before stand-ins for engines, all of which take requests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from kvgraph_bench.fleet.stand_in_engine import Routed, StandInEngine, routed


@pytest.fixture
async def fleet() -> AsyncIterator[Routed]:
    async with routed([StandInEngine(), StandInEngine()]) as two:
        await two.until(True, True)
        yield two


@pytest.fixture
async def single() -> AsyncIterator[Routed]:
    async with routed([StandInEngine()]) as one:
        await one.until(True)
        yield one
