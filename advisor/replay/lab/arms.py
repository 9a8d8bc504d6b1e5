"""The arms of a replay: every policy by its name, as one function of trace and capacity."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from ....graph.ranking.policy import Policy
from ....graph.ranking.profile import ScoreProfile
from ...policies.registry import DEFAULT, POLICIES, new_policy
from ..engine.instance import Instance
from ..engine.simulator import Load, simulate
from ..errors import ReplayError
from ..fast.bounds import belady_hits, infinite_for_multi_turn_hits, infinite_hits
from ..fast.library import ALGORITHMS, is_installed, library_hits
from ..fast.lru import lru_hits
from ..orders.baselines import LfuHistoryOrder, SessionTailOrder, SessionTtlOrder
from ..orders.foresight import BeladyOrder
from ..orders.graph_order import GraphOrder, Planning
from ..orders.orders import EvictionOrder, LruOrder
from ..orders.simulated_sidecar import SimulatedSidecar
from ..traces.trace import Ints, Trace

HINTS: Final = "+hints"
"""Suffix of a graph policy's name: callers name their sessions and say what the trace knows.

Without it nobody says anything: sessions are inferred from chains, as live.
"""

LAYERS: Final = "+layers"
"""Suffix of a graph policy's name: nobody says anything, and the engine reads off each prompt where
its parts are, as far as the trace knows."""

STOPS: Final = "+stops"
"""Suffix of a graph policy's name: nobody says anything, and the engine reads off each answer why
it ended, as it does by default where its chat template has a form for tool calls."""

SUFFIXES: Final = (HINTS, LAYERS, STOPS)

BY_DEFAULT: Final = "default"
"""The graph policy that a sidecar runs with no configuration."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What arms share.

    Attributes:
        planning: How graph policies plan.
        profile: Weights and rules; None takes the defaults.
        guard: Whether LRU rules until a graph policy has shown that it finds more.
        load: With it time passes while requests run, for the arms that know of it.
        session_ttl_s: Of the session TTL baseline.
    """

    planning: Planning = field(default_factory=Planning)
    profile: ScoreProfile | None = None
    guard: bool = True
    load: Load | None = None
    session_ttl_s: float = 300.0


OrderMaker = Callable[[Trace, Settings], EvictionOrder]
Fast = Callable[[Trace, int], Ints]


def graph_policies() -> dict[str, Callable[[Settings], Policy]]:
    """The live policies by name: the objects that a sidecar runs."""
    names = {BY_DEFAULT: DEFAULT, **{name: name for name in POLICIES}}
    return {arm: partial(_policy, name) for arm, name in names.items()}


def _policy(name: str, settings: Settings) -> Policy:
    return new_policy(name, settings.profile)


ORDERS: Final[dict[str, OrderMaker]] = {
    "lru": lambda trace, settings: LruOrder(),
    "lfu-history": lambda trace, settings: LfuHistoryOrder(),
    "session-ttl": lambda trace, settings: SessionTtlOrder(trace, settings.session_ttl_s),
    "session-tail": lambda trace, settings: SessionTailOrder(trace),
    "belady-pool": lambda trace, settings: BeladyOrder(trace),
}
"""Orders that the simulator runs, beside those of graph policies."""

FAST: Final[dict[str, Fast]] = {
    "lru": lru_hits,
    **{name: partial(library_hits, policy=name) for name in ALGORITHMS},
    "belady": belady_hits,
    "infinite": lambda trace, capacity: infinite_hits(trace),
    "infinite-multi-turn": infinite_for_multi_turn_hits,
}
"""Arms with an inner loop of their own; requests take no time there."""

BOUNDS: Final = ("belady-pool", "belady", "infinite-multi-turn", "infinite")
"""Arms that know the future: no policy to choose, but what policies are measured against."""


def arm_names() -> list[str]:
    """The names that ``all`` stands for: baselines, then graph policies, then bounds.

    Every graph policy can get callers' hints, but a table shows that for the default only: the gain
    from hints shows there, and graph policies take most of a table's time. The default is listed
    under its own name.
    """
    graph = [*(name for name in POLICIES if name not in ORDERS), DEFAULT + HINTS]
    online = [name for name in {**ORDERS, **FAST} if name not in BOUNDS]
    if not is_installed():
        online = [name for name in online if name not in ALGORITHMS]
    return [*online, *graph, *BOUNDS]


def chosen_arms(names: Sequence[str]) -> list[str]:
    """The arms that ``names`` ask for; ``all`` is every one that can run here.

    Raises:
        ReplayError: There is no such arm.
    """
    known = arm_names()
    more = [*ALGORITHMS, *order_names()]
    allowed = [*known, *(name for name in more if name not in known)]
    for name in names:
        if name != "all" and name not in allowed:
            raise ReplayError(f"policy {name!r}: allowed: all, {', '.join(allowed)}")
    return known if "all" in names else list(dict.fromkeys(names))


def without_suffix(name: str) -> str:
    """An arm's name without ``+hints``, ``+layers`` or ``+stops``."""
    told = next((suffix for suffix in SUFFIXES if name.endswith(suffix)), "")
    return name.removesuffix(told)


def order_names() -> list[str]:
    """Every eviction order that an instance can have: what ``new_order`` makes."""
    policies = graph_policies()
    told = [name + suffix for suffix in SUFFIXES for name in policies]
    return list(dict.fromkeys([*ORDERS, *policies, *told]))


def new_order(name: str, trace: Trace, settings: Settings) -> EvictionOrder:
    """A fresh eviction order of a simulated instance; raises as ``new_orders``."""
    return new_orders(name, trace, settings, 1)[0]


def new_orders(name: str, trace: Trace, settings: Settings, engines: int) -> list[EvictionOrder]:
    """Fresh eviction orders, one per engine; one sidecar advises them all, if the arm has one.

    Raises:
        ReplayError: The arm has none: it is no policy of an engine.
    """
    if name in ORDERS:
        return [ORDERS[name](trace, settings) for _ in range(engines)]
    policy = graph_policies().get(without_suffix(name))
    if policy is None:
        allowed = ", ".join(order_names())
        raise ReplayError(f"policy {name!r} cannot run here: allowed: {allowed}")
    sidecar = SimulatedSidecar(
        trace,
        policy(settings),
        rules=settings.profile,
        hints=name.endswith(HINTS),
        layers=name.endswith(LAYERS),
        stops=name.endswith(STOPS),
        guard=settings.guard,
    )
    return [GraphOrder(sidecar, settings.planning) for _ in range(engines)]


def run_arm(name: str, trace: Trace, capacity: int, settings: Settings) -> Ints:
    """int32 ``[requests]``: prompt blocks matched by prefix, with one engine of ``capacity``."""
    if name in FAST and (settings.load is None or name not in ORDERS):
        return FAST[name](trace, capacity)
    instance = Instance(capacity, new_order(name, trace, settings))
    return simulate(trace, [instance], load=settings.load).hits
