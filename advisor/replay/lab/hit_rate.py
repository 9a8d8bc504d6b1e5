"""The lab in one call: which share of a trace's prompts one engine would have found in its
cache."""

from __future__ import annotations

from ....graph.ranking.policy import Policy
from ..engine.instance import Instance
from ..engine.simulator import simulate
from ..orders.graph_order import GraphOrder
from ..traces.trace import Ints, Trace
from .arms import BY_DEFAULT, Settings, run_arm


def hit_rate(trace: Trace, capacity: int, policy: Policy | str = BY_DEFAULT) -> float:
    """Replay a trace through one engine; prompt blocks found in its pool / all prompt blocks.

    Args:
        capacity: Blocks of the pool.
        policy: A name that ``kvgraph replay --policy`` takes, or an object of your own, which must
            be fresh, since it may learn. As in a live sidecar, it ranks only while it finds more
            than LRU would, and knows only what an engine sees.

    Raises:
        ReplayError: No policy has that name.
    """
    return float(_hits(trace, capacity, policy).sum() / max(1, trace.prompt_blocks))


def _hits(trace: Trace, capacity: int, policy: Policy | str) -> Ints:
    if isinstance(policy, str):
        return run_arm(policy, trace, capacity, Settings())
    return simulate(trace, [Instance(capacity, GraphOrder.alone(trace, policy))]).hits
