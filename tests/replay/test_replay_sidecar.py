"""A simulated sidecar of several engines hears of each as late as a live one."""

from __future__ import annotations

from kvgraph.advisor.policies.registry import new_policy
from kvgraph.advisor.replay.arms import BY_DEFAULT, HINTS, Settings, new_orders
from kvgraph.advisor.replay.graph_order import EngineUpdate, SimulatedSidecar
from kvgraph.advisor.replay.simulator import Instance, simulate
from kvgraph.advisor.replay.trace import Trace
from made_trace import chat_trace


def told(trace: Trace) -> tuple[SimulatedSidecar, list[str]]:
    """Two engines, each of which stored the blocks of one request at 10 s."""
    sidecar = SimulatedSidecar(trace, new_policy("lifecycle"), hints=True)
    engines = [sidecar.join(1000) for _ in range(2)]
    for request, engine in enumerate(engines):
        blocks = trace.chain(request).tolist()
        sidecar.happened(engine, EngineUpdate(10.0, sidecar.events.started(request, 0)))
        sidecar.happened(engine, EngineUpdate(10.0, sidecar.events.stored(request, 0), blocks))
    return sidecar, engines


def test_an_engines_own_news_are_heard_sooner_than_the_others() -> None:
    sidecar, (first, second) = told(chat_trace(10, seed=5))
    sidecar.hear(first, 10.1, 9.9)
    assert sidecar.graph.resident_count(first) > 0
    assert sidecar.graph.resident_count(second) == 0
    assert len(sidecar.graph.tables.sessions) == 1
    sidecar.hear(first, 10.3, 10.1)
    assert sidecar.graph.resident_count(second) > 0
    sidecar.graph.check_integrity()


def test_a_block_of_two_engines_is_one_with_two_residencies() -> None:
    trace = chat_trace(10, seed=5)
    sidecar, (first, second) = told(trace)
    sidecar.hear(first, 11.0, 11.0)
    own = [set(trace.chain(request).tolist()) for request in range(2)]
    assert sidecar.graph.resident_count(first) == len(own[0])
    assert sidecar.graph.resident_count(second) == len(own[1])
    assert len(sidecar.graph.tables.blocks) == len(own[0] | own[1])
    gone = sorted(own[0])[:1]
    sidecar.happened(first, EngineUpdate(12.0, None, gone))
    sidecar.hear(second, 13.0, 12.5)
    assert sidecar.graph.resident_count(first) == len(own[0]) - 1
    assert sidecar.graph.resident_count(second) == len(own[1])


def test_engines_that_share_a_sidecar_find_the_same_each_time() -> None:
    trace = chat_trace(150, seed=5)
    runs = []
    for _ in range(2):
        orders = new_orders(BY_DEFAULT + HINTS, trace, Settings(), 3)
        engines = [Instance(40, order) for order in orders]
        runs.append(simulate(trace, engines, router=lambda request, _: request % 3).hits.tolist())
    assert runs[0] == runs[1]
    assert sum(runs[0]) > 0
