"""How long a request waited before it was scheduled, as vLLM's own requests tell."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from kvgraph.graph.wire.events import RequestStarted
from kvgraph_bench.paper.paper_engine import Shape
from paper import text

pytestmark = pytest.mark.usefixtures("vllm_loaded")


@pytest.mark.parametrize(
    ("before", "least", "most"),
    [(30.0, 30.0, 3600.0), (-30.0, 0.0, 0.0), (1e9, 0.0, 0.0), (float("nan"), 0.0, 0.0)],
)
def test_a_start_tells_the_wait(
    paper: Callable[..., Any], before: float, least: float, most: float
) -> None:
    """A clock that went back, or another clock, tells none."""
    engine = paper(Shape(blocks=100, warm=None), clock=time.monotonic)
    engine.side.client.outbox.open()
    request = engine.ask(text(6, 1))
    request.arrival_time = time.time() - before
    engine.settle()
    (start,) = [
        event for event in engine.side.client.outbox.take_all() if isinstance(event, RequestStarted)
    ]
    assert least <= start.waited_s <= most
