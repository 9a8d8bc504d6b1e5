"""Three real engines, and routers that take turns before them.

It runs in a network of its own (``apart.py``), since Ray listens beyond loopback. In a take, each
router plays the same requests; another take is of other sessions, before new engines with a pool
that suits it: which of two dozen sessions share an engine decides more than the router does. Pools
are emptied between two passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from ...agents.agents_arms import AgentPass
from ...figures import quantile
from ...serving.progress import DemoProgress
from ...serving.vllm_server import Server
from ..fleet_demo import SEED, plan_and_requests, rivals, running_fleet
from ..fleet_demo_report import details
from ..fleet_stage import OURS, FleetStage
from ..processes.apart import tell
from .ray_process import RayProcess, has_ray

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
