"""Whatever is broken while we leave an engine: nothing of ours crosses, and all else is left."""

from __future__ import annotations

import gc
import logging
import time
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from kvgraph.hooks.vllm.patches import bind_scheduler
from kvgraph_bench.paper.paper_engine import PaperEngine, Shape
from paper import fail, park, text

pytestmark = pytest.mark.usefixtures("vllm_loaded")

Paper = Callable[..., Any]

PERSISTENT = [
    "bridge.ledger.clear",
    "bridge.ledger.announce_dropped",
    "bridge.ledger.directory.drop",
    "holding.end",
    "tap.detach",
    "client.close",
]


def break_for_good(side: Any, where: str) -> None:
    *path, name = where.split(".")
    owner = side
    for part in path:
        owner = getattr(owner, part)
    setattr(owner, name, fail)


def closed(side: Any) -> list[float]:
    """What the client's ``close`` is called with from now on."""
    waits: list[float] = []
    close = side.client.close
    side.client.close = lambda wait_s: (waits.append(wait_s), close(wait_s))[1]
    return waits


@pytest.mark.parametrize("where", PERSISTENT)
def test_what_fails_again_while_we_leave_does_not_cross(
    paper: Paper, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A reset is caught up with by a thing that is broken, and leaving needs the same thing."""
    engine = paper(Shape(blocks=33, warm=64))
    park(engine, text(4, 1))
    side, waits = engine.side, closed(engine.side)
    bind_scheduler(engine.scheduler)
    break_for_good(side, where)
    side.arranger.step = fail
    engine.reset()
    with caplog.at_level(logging.WARNING):
        engine.serve(text(4, 2))
    assert engine.side is None, "ours is out of the way"
    assert waits == [0.0] or where == "client.close"
    assert any("RuntimeError while it left" in each.getMessage() for each in caplog.records)
    assert "injected" not in caplog.text
    assert engine.serve(text(4, 1)) is not None
    assert engine.is_whole()


@pytest.mark.parametrize("where", PERSISTENT)
def test_an_engine_that_shuts_down_ends_its_workers_whatever_fails(
    paper: Paper, where: str
) -> None:
    engine = paper(Shape(blocks=33, warm=64))
    park(engine, text(4, 1))
    connector, ended = engine.connector, list[bool]()
    connector.worker = SimpleNamespace(close=lambda: ended.append(True))
    bind_scheduler(engine.scheduler)
    break_for_good(engine.side, where)
    connector.shutdown()
    assert ended == [True]
    assert connector.side is None


@pytest.mark.parametrize("warm", [None, 64])
def test_an_engine_that_was_shut_down_leaves_no_pool_behind(
    paper_config: Any, warm: int | None
) -> None:
    """In a notebook several engines live in one process, one after the other."""
    engine = PaperEngine(paper_config, Shape(blocks=65, warm=warm))
    engine.serve(text(7, 1), 4)
    pool = weakref.ref(engine.pool)
    engine.close()
    del engine
    for _ in range(20):  # the client's thread may be about to end
        gc.collect()
        if pool() is None:
            break
        time.sleep(0.01)
    assert pool() is None
