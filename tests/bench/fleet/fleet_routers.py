"""Our router beside round robin, a consistent hash, power of two, and Ray's that goes by prefixes:
what they find in caches, and how long the slowest prompts wait.

In a take each router plays the same requests before the same three real engines, whose pools are
emptied between two passes. Another take is of other sessions, before new engines with a pool that
suits it: which of two dozen sessions share an engine decides more than the router does. All of it
runs in a network of its own (``apart``), since Ray listens beyond loopback.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from ..agents.agents_arms import AgentPass
from ..errors import BenchError
from ..figures import Figures, quantile
from ..serving.progress import DemoProgress
from ..serving.vllm_server import Server
from .apart import has_networks, run_apart, tell
from .fleet_demo import SEED, details, plan_and_requests, rivals, running_fleet
from .fleet_stage import OURS, FleetStage
from .router_process import RayProcess, has_ray

STAGE: Final = __name__
LONGEST_S: Final = 5400.0
_P95: Final = "95"  # a key of JSON's


def add_routers(figures: Figures, say: Callable[[str], None]) -> dict[str, Any]:
    """Let routers take turns before three real engines: each plays the same fleets. Returns what
    each did in each take; raises BenchError: no process can get a network of its own here, or the
    stage broke.
    """
    if not has_networks():
        raise BenchError("no network of its own can be made here, and Ray listens beyond loopback")
    if not has_ray():
        say("Ray is not installed, and its router not among the others: pip install 'kvgraph[ray]'")
    with tempfile.TemporaryDirectory(prefix="kvg-") as folder:
        found = run_apart(STAGE, folder, say, LONGEST_S)
    add_takes(figures, [take["routers"] for take in found["takes"]])
    return found


def add_takes(figures: Figures, takes: list[dict[str, dict[str, Any]]]) -> None:
    """Compare within each take: another take is another fleet."""
    cached = [{arm: _share(did) for arm, did in take.items()} for take in takes]
    waits = [{arm: did["ttft_ms"][_P95] for arm, did in take.items()} for take in takes]
    figures.add("cached_over_best_rival", [_over(each, max) for each in cached], "×", "> 1")
    figures.add("ttft_p95_over_best_rival", [_over(each, min) for each in waits], "×", "≤ 1.05")
    failed = sum(did["failed"] for take in takes for did in take.values())
    figures.add("failed", failed, "requests")
    for arm in takes[0]:
        name = arm.lower().replace("'", "").replace(" ", "_").replace("-", "_")
        figures.add(f"{name}_cached", [each[arm] for each in cached], "of prompt")
        figures.add(f"{name}_ttft_p95", [each[arm] for each in waits], "ms")


def _share(arm: dict[str, Any]) -> float:
    """Of the answered prompts' tokens: found in a cache."""
    return float(arm["cached_tokens"] / arm["prompt_tokens"])


def _over(found: dict[str, float], best: Callable[[list[float]], float]) -> float:
    """Ours, of the best of all others in the same take."""
    return found[OURS] / best([value for arm, value in found.items() if arm != OURS])


TAKES: Final = 3
RAY: Final = "Ray's prefix-aware router"


def play(folder: str) -> dict[str, Any]:
    return {"takes": [_fleet(number, Path(folder)) for number in range(TAKES)]}


def _fleet(number: int, out: Path) -> dict[str, Any]:
    plan, requests = plan_and_requests(out, seed=SEED + number)
    with (
        DemoProgress(len(requests), False) as shown,
        running_fleet(plan, shown) as (runtime, engines, _),
    ):
        tell(f"take {number + 1}: {len(engines)} engines run, with {plan.blocks} blocks each")
        stage = FleetStage(out, runtime, engines, requests, shown)
        pace = stage.warm_up()
        routers = _take(number, stage, engines, out, pace)
    return {
        "seed": SEED + number,
        "requests": len(requests),
        "sessions": len({each.session for each in requests}),
        "pool_blocks": plan.blocks,
        "pace": pace,
        "routers": routers,
    }


def _take(
    number: int, stage: FleetStage, engines: Sequence[Server], out: Path, pace: float
) -> dict[str, Any]:
    """Every router once; who begins changes from take to take."""
    decisions: dict[str, int] = {}

    def ours() -> AgentPass:
        passed, why = stage.ours(pace)
        decisions.update(why)
        return passed

    passes: list[tuple[str, Callable[[], AgentPass]]] = [
        (OURS, ours),
        *((arm, partial(stage.rival, arm, pick, pace)) for arm, pick in rivals()),
    ]
    if has_ray():
        passes.append((RAY, partial(_behind_ray, stage, engines, out, pace)))
    first = number % len(passes)
    found = {}
    for arm, play_it in (*passes[first:], *passes[:first]):
        passed = play_it()
        found[arm] = details(passed)
        waits = " and ".join(f"{quantile(passed.result.ttft_ms, p):,.0f}" for p in (50, 95))
        tell(f"take {number + 1}, {arm}: {passed.share:.1%} of the prompt found, "
             f"TTFT p50 and p95 {waits} ms, {passed.result.wall_s:.0f} s")  # fmt: skip
    found[OURS]["decisions"] = decisions
    return found


def _behind_ray(stage: FleetStage, engines: Sequence[Server], out: Path, pace: float) -> AgentPass:
    with RayProcess([each.url for each in engines], out / "ray.log") as front:
        return stage.behind(RAY, front.url, pace)
