"""An engine that has a request and says nothing: when the request goes to another one."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from kvgraph.advisor.process.process import HeadDeadline, most_connections
from kvgraph_bench.fleet.stand_in_engine import Routed, StandInEngine, routed
from stand_ins import TEXT, all_up, hang, hold, served
from waiting import soon


def fleet_of(engines: int, first_byte_s: float) -> Any:
    return routed([StandInEngine() for _ in range(engines)], first_byte_s=first_byte_s)


async def hang_where_it_goes(
    fleet: Routed, **more: Any
) -> tuple[StandInEngine, asyncio.Task[httpx.Response]]:
    """Send a request that every engine would leave unanswered; and who has it."""
    for engine in fleet.engines:
        hang(engine)
    asked = asyncio.create_task(fleet.complete("a", **more))
    await soon(lambda: sum(served(fleet)))
    return next(engine for engine in fleet.engines if engine.got), asked


def let_go(engine: StandInEngine) -> None:
    assert engine.hangs is not None
    engine.hangs.set()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_leaves_an_engine_that_says_nothing(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose answer is not streamed does where the engine's health is silent too."""
    if not stream:
        monkeypatch.setattr("kvgraph.advisor.fleet.engines.TIMEOUT_S", 0.2)
    async with fleet_of(2, 1.0) as fleet:
        hung, asked = await hang_where_it_goes(fleet, stream=stream)
        hung.silent = not stream
        (other,) = (engine for engine in fleet.engines if engine is not hung)
        let_go(other)
        async with asyncio.timeout(60):
            assert (await asked).text == TEXT
        assert fleet.proxy.counts.hung == fleet.proxy.counts.retried == 1
        assert len(other.got) == 1
        await soon(lambda: hung.left == 1)  # it is told: its connection is closed


async def test_an_answer_that_is_not_streamed_may_take_long_at_an_engine_that_is_well() -> None:
    async with fleet_of(2, 0.2) as fleet:
        slow, asked = await hang_where_it_goes(fleet)
        await asyncio.sleep(1.0)
        assert not asked.done()
        let_go(slow)
        assert (await asked).text == TEXT
        assert fleet.proxy.counts.hung == 0
        assert sum(served(fleet)) == 1


async def test_a_request_that_hangs_everywhere_is_refused_and_says_why() -> None:
    async with fleet_of(1, 0.5) as fleet:
        _, asked = await hang_where_it_goes(fleet, stream=True)
        assert (await asked).status_code == 502
        assert fleet.proxy.counts.hung == 2


@pytest.mark.parametrize(
    "begun", [b"", b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"], ids=["nothing", "half a head"]
)
async def test_a_client_whose_request_never_begins_is_cut_and_one_that_waits_is_not(
    begun: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HeadDeadline, "head_s", 0.3)
    async with all_up(StandInEngine()) as fleet:
        reader, writer = await connected(fleet)
        writer.write(begun)
        await is_cut(reader)
        writer.close()
        held = hold(*fleet.engines)
        waiting = asyncio.create_task(fleet.complete())
        await asyncio.sleep(1)
        held.set()
        assert (await waiting).text == TEXT
        assert (await fleet.complete()).status_code == 200


async def test_with_too_many_connections_those_that_were_silent_for_longest_are_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvgraph.advisor.process.process.most_connections", lambda: 4)
    async with all_up(StandInEngine()) as fleet:
        held = hold(*fleet.engines)
        waiting = asyncio.create_task(fleet.complete())
        await soon(lambda: served(fleet) == [1])
        silent = [await connected(fleet) for _ in range(6)]
        for reader, _ in silent[:3]:  # the one that waits for its answer counts, and stays
            await is_cut(reader)
        assert not any(reader.at_eof() for reader, _ in silent[3:])
        held.set()
        assert (await waiting).text == TEXT
        for _, writer in silent:
            writer.close()


async def connected(fleet: Routed) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    at = urlsplit(fleet.url)
    return await asyncio.open_connection(at.hostname, at.port)


async def is_cut(reader: asyncio.StreamReader) -> None:
    async with asyncio.timeout(15):
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""


def test_half_of_the_descriptors_are_for_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    for allowed, most in ((1024, 512), (1 << 20, 8192), (resource.RLIM_INFINITY, 8192)):
        monkeypatch.setattr(resource, "getrlimit", lambda which, n=allowed: (n, n))
        assert most_connections() == most
