"""Requests that engines drop, whichever gets them: what that costs the requests of others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from kvgraph.advisor.fleet import engines as health
from kvgraph.advisor.process.process import log_for_people
from kvgraph_bench.fleet.stand_in_engine import Routed, StandInEngine
from stand_ins import TEXT, all_up, answer_of, hang, served
from waiting import soon

HANGS_UP, HALF, DIES = "hang up", "answer half", "die"
"""Prompts: the connection is closed before the answer, or in the middle; the engine ends."""


class Picky(StandInEngine):
    """Drops requests by what their prompts say; others are answered."""

    def __init__(self, *dropped: str) -> None:
        super().__init__()
        self.dropped = {HANGS_UP, *dropped}

    def asked(self, prompt: str) -> int:
        """How often it came."""
        return sum(body["prompt"] == prompt for body in self.got)

    async def _stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        prompt = self.got[-1]["prompt"]
        if prompt == DIES:
            self.kill()
        if prompt == HALF:
            writer.write(answer_of(200, TEXT.encode())[:-4])
            await writer.drain()
        if prompt in (HALF, DIES, *self.dropped):
            writer.transport.abort()
            raise ConnectionError
        await super()._stream(reader, writer)


@pytest.fixture
def no_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nobody look at engines by the clock, so that what a test sees came of requests."""
    monkeypatch.setattr(health, "INTERVAL_S", 60.0)


async def others_are_answered(
    fleet: Routed, until: asyncio.Task[Any], look: Callable[[], object] = bool
) -> None:
    """Send requests of other callers, one after the other, until a task is done."""
    answered = 0
    while not until.done():
        answer = await fleet.complete(f"other {answered}", session_id=f"s{answered}")
        assert answer.status_code == 200, answer.text
        look()
        answered += 1
    assert answered


async def test_a_request_that_every_engine_drops_takes_none_from_others() -> None:
    engines = [Picky() for _ in range(3)]
    async with all_up(*engines) as fleet:

        async def poison() -> list[httpx.Response]:
            return [await fleet.complete(HANGS_UP) for _ in range(10)]

        poisoned = asyncio.create_task(poison())
        seen_up = list[bool]()
        await others_are_answered(
            fleet, poisoned, lambda: seen_up.append(bool(fleet.proxy.board.up.all()))
        )
        for answer in await poisoned:
            assert answer.status_code == 502
            assert "dropped this request, so it is sent to no further" in answer.text
            assert answer.headers["x-should-retry"] == "false"
        assert all(seen_up)
        assert sum(each.asked(HANGS_UP) for each in engines) == 20, "two engines for each"
        assert fleet.proxy.counts.unserved == 10


async def test_it_is_sent_to_no_engine_twice_while_there_is_another() -> None:
    engines = [Picky() for _ in range(2)]
    async with all_up(*engines) as fleet:
        fleet.proxy.board.waiting[1] = 10_000_000  # anything else would go to the other one
        for _ in range(3):
            assert (await fleet.complete(HANGS_UP)).status_code == 502
        assert [each.asked(HANGS_UP) for each in engines] == [3, 3]


async def test_one_engine_alone_is_asked_once_more_and_goes_on() -> None:
    engine = Picky()
    async with all_up(engine) as fleet:
        began = time.monotonic()
        assert (await fleet.complete(HANGS_UP)).status_code == 502
        assert engine.asked(HANGS_UP) == 2
        assert fleet.proxy.board.up.all()
        assert (await fleet.complete("other")).status_code == 200
        assert time.monotonic() - began < 5, "nobody waited for an engine"


async def test_an_answer_that_breaks_is_not_begun_again_and_takes_no_engine_from_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log_for_people()
    engines = [Picky() for _ in range(2)]
    async with all_up(*engines) as fleet:
        for number in range(6):
            with pytest.raises(httpx.RemoteProtocolError):
                await fleet.complete(HALF, session_id=f"s{number}")
            assert fleet.proxy.board.up.all()
        assert fleet.proxy.counts.broken == 6
        assert [each.asked(HALF) for each in engines] == [3, 3]
        await asyncio.gather(*fleet.proxy.health._looks.values())
        assert fleet.proxy.board.up.all()
    assert "in the middle of an answer" in caplog.text
    assert "ASGI" not in caplog.text, "the server's word for it helps nobody"


@pytest.mark.usefixtures("no_watch")
async def test_a_request_that_kills_engines_kills_two_and_others_are_served_by_the_rest() -> None:
    async with all_up(Picky(), Picky(), Picky()) as fleet:
        poisoned = asyncio.create_task(fleet.complete(DIES))
        await others_are_answered(fleet, poisoned)
        assert (await poisoned).status_code == 502
        await soon(lambda: int(fleet.proxy.board.up.sum()) == 1)  # by what requests met alone
        for number in range(6):
            assert (await fleet.complete(f"later {number}")).status_code == 200


@pytest.mark.usefixtures("no_watch")
async def test_an_engine_that_drops_a_request_and_is_not_well_is_down_at_once(
    fleet: Routed,
) -> None:
    for engine in fleet.engines:
        engine.drops = True
    fleet.engines[1].healthy = False
    assert (await fleet.complete()).status_code == 502
    await fleet.until(True, False)
    assert "not well" in fleet.proxy.health.why[1]


async def test_an_engine_that_drops_a_request_and_is_slow_is_not_down_for_that(
    single: Routed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "TIMEOUT_S", 0.1)
    single.engines[0].silent = True
    for slow, is_up in ((1000, True), (1, False)):
        monkeypatch.setattr(health, "SLOW", slow)
        await single.proxy.health.look_at(single.proxy.engines.upstreams[0], "dropped")
        assert single.proxy.board.up.tolist() == [is_up]


@pytest.mark.usefixtures("no_watch")
async def test_many_requests_that_are_dropped_at_once_are_one_question(fleet: Routed) -> None:
    engine, hung = fleet.engines[0], hang(*fleet.engines)
    asked = [asyncio.create_task(fleet.complete(f"{n}")) for n in range(20)]
    await soon(lambda: sum(served(fleet)) == 20)
    assert len(engine.got) > 4
    before_it = engine.looks
    engine.hang_up()
    await soon(lambda: fleet.proxy.counts.retried == len(engine.got))
    assert engine.looks <= before_it + 2
    hung.set()
    assert {(await each).text for each in asked} == {TEXT}


async def sessions_at(fleet: Routed, engine: int, number: int) -> list[str]:
    """Names of so many sessions that are at home there."""
    found = list[str]()
    for name in (f"s{n}" for n in range(20)):
        answer = await fleet.complete("fine", session_id=name)
        if answer.headers["x-kvgraph-engine"] == str(engine):
            found.append(name)
    return found[:number]


async def test_what_others_answer_is_the_engines_fault_from_the_second_time_in_a_row() -> None:
    """Whatever it says of itself; a single connection may always break."""
    bad, good = Picky("odd"), Picky()
    async with all_up(bad, good) as fleet:
        first, second, third, fourth = await sessions_at(fleet, 0, 4)
        for session in (first, second):  # it answers in between
            assert (await fleet.complete("odd", session_id=session)).status_code == 200
            assert fleet.proxy.board.up.all()
            assert (await fleet.complete("fine", session_id=fourth)).status_code == 200
        assert (await fleet.complete("odd", session_id=third)).status_code == 200
        assert fleet.proxy.board.up.all()
        assert (await fleet.complete("odd", session_id=fourth)).status_code == 200
        assert fleet.proxy.board.up.tolist() == [False, True]
        assert bad.asked("odd") == 4
        await soon(lambda: bool(fleet.proxy.board.up.all()))


async def test_an_engine_that_is_back_does_not_pay_for_what_it_dropped_before(
    fleet: Routed,
) -> None:
    watch, upstream = fleet.proxy.health, fleet.proxy.engines.upstreams[0]
    dropped_at = time.monotonic()
    watch.dropped(upstream, "it died")
    await fleet.until(True, True)
    for _ in range(3):
        watch.outdone(upstream, dropped_at)
    assert fleet.proxy.board.up.all()
    for _ in range(2):
        watch.outdone(upstream, time.monotonic())
    assert fleet.proxy.board.up.tolist() == [False, True]


async def test_one_engine_alone_is_looked_at_first_and_waited_for_if_it_is_not_well(
    single: Routed,
) -> None:
    (engine,) = single.engines
    hang(engine)
    asked = asyncio.create_task(single.complete())
    await soon(lambda: engine.got)
    engine.drops, engine.healthy = True, False
    engine.hang_up()
    await single.until(False)
    engine.hangs, engine.drops, engine.healthy = None, False, True
    assert (await asked).status_code == 200
    assert len(engine.got) == 2
