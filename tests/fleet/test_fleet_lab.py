"""The lab's fleets."""

from __future__ import annotations

from kvgraph.advisor.replay.fast import infinite_hits
from kvgraph.advisor.replay.plan import FleetRouting
from kvgraph.advisor.replay.simulator import HostTier, Instance, LruOrder, simulate
from made_trace import chat_trace


def test_a_shared_store_that_forgets_nothing_makes_engines_one() -> None:
    trace = chat_trace(200)
    store = HostTier(trace.num_blocks)
    pools = [Instance(60, LruOrder(), host=store) for _ in range(4)]
    routing = FleetRouting(trace, store)
    outcome = simulate(trace, pools, router=routing)
    assert (outcome.hits + outcome.warmed).sum() > 0.9 * infinite_hits(trace).sum()


def test_queues_hold_back_what_would_wait_too_long() -> None:
    """All turns at once: homes overflow, and later turns yield."""
    trace = chat_trace(200)
    routing = FleetRouting(trace, tokens_per_s=10.0)
    simulate(trace, [Instance(500, LruOrder()) for _ in range(3)], router=routing)
    assert routing.queues is not None
    waited = routing.queues.waited(3)
    assert (waited > 0).all()
    assert routing.router.counts["home_overloaded"] > 0
