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
from waiting import soon


def fleet_of(engines: int, first_byte_s: float) -> Any:
    return routed([StandInEngine() for _ in range(engines)], first_byte_s=first_byte_s)


async def hang_where_it_goes(fleet: Routed, **more: Any) -> tuple[int, asyncio.Task[Any]]:
    """Send a request that every engine would leave unanswered; and who has it."""
    for engine in fleet.engines:
        engine.hangs = asyncio.Event()
    asked = asyncio.create_task(fleet.complete("a", **more))
    async with asyncio.timeout(20):
        while not (got := [len(engine.got) for engine in fleet.engines]) or not sum(got):
            await asyncio.sleep(0.01)
    return got.index(1), asked


async def test_a_streamed_request_leaves_an_engine_that_says_nothing() -> None:
    async with fleet_of(2, 1.0) as fleet:
        hung, asked = await hang_where_it_goes(fleet, stream=True)
        other = fleet.engines[1 - hung]
        assert other.hangs is not None
        other.hangs.set()
        assert (await asked).text == "one two three"
        assert fleet.proxy.counts.hung == fleet.proxy.counts.retried == 1
        assert len(other.got) == 1
        await soon(lambda: fleet.engines[hung].left == 1)  # it is told: its connection is closed


async def test_an_answer_that_is_not_streamed_may_take_long_at_an_engine_that_is_well() -> None:
    async with fleet_of(2, 0.2) as fleet:
        slow, asked = await hang_where_it_goes(fleet)
        await asyncio.sleep(1.0)
        assert not asked.done()
        waits = fleet.engines[slow].hangs
        assert waits is not None
        waits.set()
        assert (await asked).text == "one two three"
        assert fleet.proxy.counts.hung == 0
        assert len(fleet.engines[1 - slow].got) == 0


async def test_such_a_request_leaves_an_engine_whose_health_is_silent_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvgraph.advisor.fleet.engines.TIMEOUT_S", 0.2)
    async with fleet_of(2, 1.0) as fleet:
        hung, asked = await hang_where_it_goes(fleet)
        fleet.engines[hung].silent = True
        other = fleet.engines[1 - hung]
        assert other.hangs is not None
        other.hangs.set()
        async with asyncio.timeout(60):
            assert (await asked).text == "one two three"
        assert fleet.proxy.counts.hung == 1


async def test_a_request_that_hangs_everywhere_is_refused_and_says_why() -> None:
    async with fleet_of(1, 0.5) as fleet:
        _, asked = await hang_where_it_goes(fleet, stream=True)
        answer: httpx.Response = await asked
        assert answer.status_code == 502
        assert fleet.proxy.counts.hung == 2


async def test_a_client_whose_request_never_begins_is_cut_and_one_that_waits_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(HeadDeadline, "head_s", 0.3)
    engine = StandInEngine()
    async with routed([engine]) as fleet:
        await fleet.until(True)
        at = urlsplit(fleet.url)
        for begun in (b"", b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"):
            reader, writer = await asyncio.open_connection(at.hostname, at.port)
            writer.write(begun)
            async with asyncio.timeout(15):
                with contextlib.suppress(ConnectionError):
                    assert await reader.read() == b""
            writer.close()
        engine.hold = asyncio.Event()
        waiting = asyncio.create_task(fleet.complete())
        await asyncio.sleep(1)
        engine.hold.set()
        assert (await waiting).text == "one two three"
        assert (await fleet.complete()).status_code == 200


async def test_with_too_many_connections_those_that_were_silent_for_longest_are_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvgraph.advisor.process.process.most_connections", lambda: 4)
    engine = StandInEngine()
    async with routed([engine]) as fleet:
        await fleet.until(True)
        at = urlsplit(fleet.url)
        engine.hold = asyncio.Event()
        waiting = asyncio.create_task(fleet.complete())
        await soon(lambda: len(engine.got) == 1)
        silent = [await asyncio.open_connection(at.hostname, at.port) for _ in range(6)]
        async with asyncio.timeout(15):
            for reader, _ in silent[:3]:  # the one that waits for its answer counts, and stays
                with contextlib.suppress(ConnectionError):
                    assert await reader.read() == b""
        assert not any(reader.at_eof() for reader, _ in silent[3:])
        engine.hold.set()
        assert (await waiting).text == "one two three"
        for _, writer in silent:
            writer.close()


def test_half_of_the_descriptors_are_for_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    for allowed, most in ((1024, 512), (1 << 20, 8192), (resource.RLIM_INFINITY, 8192)):
        monkeypatch.setattr(resource, "getrlimit", lambda which, n=allowed: (n, n))
        assert most_connections() == most
