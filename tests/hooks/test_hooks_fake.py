"""The fake engine that tests of the sidecar stand on: its memory must behave."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from kvgraph.graph.wire.advice import RankingMessage
from kvgraph.graph.wire.events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    EngineHello,
    RequestFinished,
    RequestStarted,
)
from kvgraph.hooks.fake import FakeEngine
from kvgraph.hooks.link.client import ClientOptions

OPTIONS = ClientOptions(tick_s=0.01, heartbeat_s=0.05)


def prompt(blocks: int, salt: int = 0) -> list[int]:
    return [salt, *range(blocks * 16 - 1)]


def test_prefixes_hit_and_the_oldest_goes_first() -> None:
    engine = FakeEngine("ipc:///nowhere", num_blocks=8)
    assert engine.run(prompt(4, 1)) == 0
    assert engine.run(prompt(4, 1) + [7] * 16) == 64
    engine.run(prompt(4, 2))
    tail_of_first = engine.keys(prompt(4, 1) + [7] * 16)[-1]
    assert engine.evicted == [tail_of_first]
    assert len(engine.cached) == 8


def test_a_prompt_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="do not fit into a pool of 2"):
        FakeEngine("ipc:///nowhere", num_blocks=2).run(prompt(3))


def test_it_tells_what_happens_over_a_real_socket(router: Any) -> None:
    with FakeEngine(router.endpoint, num_blocks=4, options=OPTIONS) as engine:
        engine.run(prompt(3, 1), session="a")
        engine.run(prompt(3, 2), session="b", session_ended=True)
        engine.reset()
        router.read_until(lambda: router.has(BlocksCleared))
    kinds = [type(e) for e in router.events]
    assert kinds[0] is EngineHello
    started, stored, finished = (
        next(e for e in router.events if isinstance(e, kind))
        for kind in (RequestStarted, BlocksStored, RequestFinished)
    )
    assert stored.hashes == started.hashes == finished.hashes
    assert stored.parent is None
    removed = [e for e in router.events if isinstance(e, BlocksRemoved)]
    assert sum(len(e.hashes) for e in removed) == 2 * 8


def test_it_evicts_by_the_ranking(router: Any) -> None:
    with FakeEngine(router.endpoint, num_blocks=6, options=OPTIONS) as engine:
        engine.run(prompt(3, 1))
        engine.run(prompt(3, 2))
        newest = engine.keys(prompt(3, 2))[::-1]
        router.read_until(lambda: router.peers)
        packed = struct.pack("<3Q", *newest)
        router.advise(RankingMessage(1, 0.0, packed, b"", b""))
        router.read_until(lambda: engine.client.ranking() is not None)
        engine.run(prompt(3, 3))
    assert engine.evicted == newest


def test_what_is_protected_goes_last(router: Any) -> None:
    with FakeEngine(router.endpoint, num_blocks=6, options=OPTIONS) as engine:
        kept, other = (engine.keys(prompt(3, salt)) for salt in (1, 2))
        engine.run(prompt(3, 1))
        engine.run(prompt(3, 2))
        router.read_until(lambda: router.peers)
        router.advise(RankingMessage(1, 0.0, b"", struct.pack("<3Q", *kept[::-1]), b""))
        router.read_until(lambda: engine.client.ranking() is not None)
        engine.run(prompt(4, 3))
    assert engine.evicted == [*other[::-1], kept[-1]]
