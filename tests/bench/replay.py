"""``kvgraph bench replay``: how fast the lab replays, and what the best policy costs live."""

from __future__ import annotations

import time
from pathlib import Path

from kvgraph.advisor.policies.registry import DEFAULT, new_policy
from kvgraph.advisor.replay.arms import Settings, arm_names
from kvgraph.advisor.replay.fast import lru_hits
from kvgraph.advisor.replay.reader import load_trace
from kvgraph.advisor.replay.tables import hit_table
from kvgraph.advisor.replay.trace import Trace
from rich.console import Console

from .errors import InputError
from .figures import Figures
from .graph.graph import timed
from .graph.graphs import ENGINE, build_graph

CAPACITIES = (1000, 2000, 5000, 10_000, 20_000)
_ROUNDS = 7
_PLANS = 30
SHARED = Path(__file__).parents[3] / "shared" / "traces" / "mooncake_conversation.jsonl"


def run(progress: bool, trace: Path | None = None) -> Figures:
    figures = Figures("replay")
    console = Console(stderr=True, quiet=not progress)
    path = trace or SHARED
    if not path.exists():
        raise InputError(f"{path}: there is no trace; name one with --trace")
    loaded = load_trace(path)
    with console.status("LRU on one core") as status:
        figures.add("lru_refs_per_s", _lru_rates(loaded), "refs/s", "≥ 1,500,000")
        status.update("planning 100,000 blocks")
        figures.add("plan_100k_ms", _plan_ms(), "ms", "≤ 25")
        status.update("every policy at five capacities, in two processes")
        table = hit_table(loaded, arm_names(), CAPACITIES, Settings())
        figures.add("table_seconds", table.seconds, "s", "≤ 120")
    return figures


def _lru_rates(trace: Trace) -> list[float]:
    """Block references a second, one sample a round, each over several capacities."""
    samples = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        for capacity in (2000, 10_000):
            lru_hits(trace, capacity)
        samples.append(2 * len(trace.blocks) / (time.perf_counter() - began))
    return samples


def _plan_ms() -> list[float]:
    """Ranking 100,000 blocks of an engine with the policy that ships for sessions."""
    graph = build_graph(100_000, 300_000)
    graph.policy = new_policy(DEFAULT)
    return [1e3 * seconds for seconds in timed(lambda: graph.rank(ENGINE, 8192), _PLANS)]
