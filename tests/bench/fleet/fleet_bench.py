"""``kvgraph bench fleet``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvgraph.advisor.replay.fleet_traffic import Signals
from kvgraph.advisor.replay.reader import load_trace
from kvgraph.advisor.replay.trace import AGENTS_SERVICE, Trace
from rich.console import Console

from ..figures import Figures, keep_raw, measured_now
from ..lab.seed_workload import FleetSize, seed_workload
from ..policies.policies_fleets import CONVERSATIONS, default_sessions, fleet, sessions_in
from .fleet_lab import SEED_SIZE, add_arms, add_generator, add_other_seeds
from .fleet_latency import add_latency
from .fleet_scale import add_imbalance, add_times
from .fleet_stock import add_stock_engines
from .fleet_store import add_store
from .kills.fleet_kills import add_kills
from .routers.fleet_routers import add_routers


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is played: recorded agents of so many ``users`` for ``hours``, and the fleets that
    serve them and ``share`` of the ``conversations``; ``sessions`` that the router of 1,000 engines
    knows, ``requests`` sent through the proxy, and ``moves`` of sessions by way of a store.
    """

    users: int
    hours: float
    agents: FleetSize
    conversations: FleetSize
    share: float
    sessions: int
    requests: int
    moves: int


FULL: Final = Scale(40, 3.0, FleetSize(8, 250), FleetSize(8, 1250), 1.0, 1_000_000, 2000, 8)
QUICK: Final = Scale(25, 1.0, FleetSize(4, 250), FleetSize(4, 1000), 0.2, 100_000, 200, 3)


PARTS: Final = ("all", "lab", "stock", "store", "kills", "routers")


def run(
    progress: bool,
    quick: bool = False,
    processes: int = 2,
    raw: Path | None = None,
    part: str = "all",
) -> Figures:
    """Measure every figure, or a short version (``quick``), whose figures are no claims. ``raw``:
    where all that each arm found, and each kill did, goes as JSON. ``part``: ``store``, ``kills``
    and ``routers`` on real engines; ``stock``: the router before engines without kvgraph; ``lab``:
    all others. Raises BenchError: there are no recorded sessions, no vLLM to start, or no
    Mooncake.
    """
    scale, figures = QUICK if quick else FULL, Figures("fleet")
    console = Console(stderr=True, quiet=not progress)

    facts: dict[str, Any] = {}

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False)

    if part in ("all", "store"):
        add_store(figures, scale.moves, say)
    if part in ("all", "kills"):
        facts["kills"] = add_kills(figures, say)
    if part in ("all", "routers"):
        facts["routers"] = add_routers(figures, say)
    if part in ("all", "stock"):
        add_stock_engines(figures, say)
    if part in ("all", "lab"):
        facts.update(_add_lab(figures, scale, progress, processes))
    if raw is not None:
        record = {**measured_now(), **figures.as_dict(), **facts}
        keep_raw(raw, record)
    return figures


def _add_lab(figures: Figures, scale: Scale, progress: bool, processes: int) -> dict[str, Any]:
    console = Console(stderr=True, quiet=not progress)
    facts: dict[str, Any] = {"generator": add_generator(figures)}
    add_other_seeds(figures)
    add_times(figures, scale.sessions)
    add_latency(figures, scale.requests)
    agents = _agents(scale)
    add_imbalance(figures, agents, scale.agents, AGENTS_SERVICE.prefill_tokens_per_s)
    plays = [("", seed_workload(), SEED_SIZE), ("agents_", agents, scale.agents)]
    if CONVERSATIONS.exists():
        conversations = load_trace(CONVERSATIONS).head(scale.share)
        plays.append(("mooncake_", conversations, scale.conversations))
    for name, trace, size in plays:
        say = _told(console, trace.name)
        facts[name or "seed"] = add_arms(figures, trace, size, name, processes, say)
    return facts


def _agents(scale: Scale) -> Trace:
    sessions = sessions_in(default_sessions(), lambda files: None)
    return fleet(f"{scale.users} users", sessions, scale.users, scale.hours, Signals.ALL)


def _told(console: Console, name: str) -> Callable[[int, int], None]:
    return lambda done, total: console.print(f"{name}: {done} of {total} arms")
