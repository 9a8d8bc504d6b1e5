"""A request that only warms a prefix says so, if it asks for one token."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from kvgraph.advisor.intents.client import hints
from kvgraph.graph.wire.events import RequestStarted
from kvgraph_bench.paper.paper_engine import Shape
from paper import text

pytestmark = pytest.mark.usefixtures("vllm_loaded")


@pytest.mark.parametrize(
    ("warming", "output", "warms"), [(True, 1, True), (True, 2, False), (None, 1, False)]
)
def test_nobody_hides_a_request_that_answers(
    paper: Callable[..., Any], warming: bool | None, output: int, warms: bool
) -> None:
    engine = paper(Shape(blocks=100, warm=None), clock=time.monotonic)
    engine.side.client.outbox.open()
    engine.serve(text(6, 1), output, **hints(session="conv:a", warming=warming))
    events = engine.side.client.outbox.take_all()
    (start,) = [event for event in events if isinstance(event, RequestStarted)]
    assert (start.session, start.warms) == ("conv:a", warms)
