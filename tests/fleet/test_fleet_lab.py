"""The lab's fleets."""

from __future__ import annotations

from kvgraph.advisor.replay.plan import FleetRouting
from kvgraph.advisor.replay.simulator import Instance, LruOrder, simulate
from made_trace import chat_trace


def test_queues_hold_back_what_would_wait_too_long() -> None:
    """All turns at once: homes overflow, and later turns yield."""
    trace = chat_trace(200)
    routing = FleetRouting(trace, tokens_per_s=10.0)
    simulate(trace, [Instance(500, LruOrder()) for _ in range(3)], router=routing)
    assert routing.router.counts["home_overloaded"] > 0
