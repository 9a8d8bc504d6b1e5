"""What one caller takes of the proxy itself, and what that says of engines: nothing."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from typing import Any

import orjson
import pytest
from kvgraph.advisor.fleet import callers, engines, upstream
from kvgraph.advisor.fleet.callers import Callers
from kvgraph_bench.fleet.stand_in_engine import StandInEngine, routed


class NoSockets:
    """A machine on which no connection can be opened while ``why`` is set."""

    why: int | None = None

    def __init__(self, real: Any) -> None:
        self._real = real

    def __call__(self, address: Any) -> Any:
        if self.why is not None:
            raise OSError(self.why, os.strerror(self.why))
        return self._real(address)


@pytest.fixture
def sockets(monkeypatch: pytest.MonkeyPatch) -> NoSockets:
    found = NoSockets(upstream._socket)
    monkeypatch.setattr("kvgraph.advisor.fleet.upstream._socket", found)
    return found


@pytest.mark.parametrize("why", [errno.EMFILE, errno.EADDRNOTAVAIL])
async def test_descriptors_that_clients_used_up_take_no_engine_out(
    sockets: NoSockets, why: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvgraph.advisor.fleet.upstream.IDLE_S", 0.01)  # each asks on a new one
    async with routed([StandInEngine(), StandInEngine()]) as fleet:
        await fleet.until(True, True)
        await asyncio.sleep(0.1)
        sockets.why = why
        answer = await fleet.complete()
        assert answer.status_code == 502
        assert "cannot be reached" in answer.text
        for each in fleet.proxy.engines.upstreams:
            await fleet.proxy.health.check(each)
        assert fleet.proxy.board.up.all()
        sockets.why = None
        assert (await fleet.complete()).status_code == 200


async def test_an_engine_is_not_silent_while_this_process_does_not_listen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engines, "TIMEOUT_S", 0.2)
    monkeypatch.setattr(engines, "INTERVAL_S", 60.0)
    async with routed([StandInEngine()]) as fleet:
        await fleet.until(True)
        engine, asked = fleet.engines[0], fleet.proxy.engines.upstreams[0]
        engine.silent = True
        for _ in range(engines.SLOW):
            check = asyncio.create_task(fleet.proxy.health.check(asked))
            await asyncio.sleep(0.05)
            time.sleep(0.6)  # as the parsing of a large body does
            await check
        assert fleet.proxy.board.up.all()
        for _ in range(engines.SLOW):
            await fleet.proxy.health.check(asked)
        assert not fleet.proxy.board.up.any()


def test_a_body_of_millions_of_values_is_the_engines_to_parse(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While it was parsed here, all others would wait."""
    monkeypatch.setattr(callers, "MOST_VALUES", 100)
    parsed: list[int] = []
    real = orjson.loads
    monkeypatch.setattr(callers.orjson, "loads", lambda data: parsed.append(1) or real(data))
    for values, turns in ((100, True), (101, False)):
        body = orjson.dumps({"prompt": [1] * values, "n": 1})
        asked = Callers().read("POST", "/v1/completions", [], body)
        assert (asked.turn is not None) is turns
        assert asked.body.data == body
        assert asked.repeatable is turns, "it may say anything"
    assert len(parsed) == 1
