"""Three running engines, and what the fleet's demo does with them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from ..agents.agents_arms import AgentPass, Pick, Sender, Telling, only_one
from ..figures import quantile
from ..recorded.agents_requests import AgentRequest
from ..serving.progress import DemoProgress
from ..serving.vllm_server import Server, ServerPlan
from .router_process import RouteProcess

LOAD: Final = 0.6
"""Share of the time in which one of the three engines would be busy by the fleet's clock, at the
speed of a cold start. Chosen: two cores serve three engines, their servers and the callers."""

LONGEST_PASS_S: Final = 75.0
"""Of a pass by the fleet's clock, however slow the machine is; chosen: the demo's five passes take
some six minutes where the machine keeps up. Beyond it, requests wait."""

WARMING: Final = 30  # requests by which engines are warmed and the machine's speed is measured

OURS: Final = "kvgraph route"
TOLD: Final = Telling(hinted=True)


@dataclass(frozen=True, slots=True)
class Killed:
    """An engine was killed with ``asked`` and ``begun`` of ``in_flight``; the proxy's status."""

    passed: AgentPass
    asked: int
    begun: int
    in_flight: int
    status: dict[str, Any]

    @property
    def cut(self) -> int:
        """Failed requests whose answers had begun: they cannot be sent again."""
        return int(self.status["requests"]["broken"])

    @property
    def failed_before(self) -> int:
        """Failed requests whose answers had not begun."""
        return len(self.passed.failed) - self.cut


def engine(plan: ServerPlan, number: int, shown: DemoProgress) -> Server:
    shown.starting(f"engine {number}")
    return Server(replace(plan, name=f"engine-{number}"))


class _Killing:
    """Kills the engine that has the most requests, when it is called."""

    def __init__(self, engines: Sequence[Server], route: RouteProcess) -> None:
        self._engines, self._route = engines, route
        self.asked = self.begun = self.in_flight = 0

    async def __call__(self, in_flight: int) -> None:
        by_url = {each.url: each for each in self._engines}
        status = await asyncio.to_thread(self._route.status)
        victim = max(status["engines"], key=lambda each: each["asked"] + each["running"])
        self.asked, self.begun, self.in_flight = victim["asked"], victim["running"], in_flight
        by_url[victim["url"]].kill()


class FleetStage:
    """Engines that run, and all arms' requests; ``store``: they share one, apart by salts."""

    def __init__(
        self,
        out: Path,
        runtime: Path,
        engines: Sequence[Server],
        requests: Sequence[AgentRequest],
        shown: DemoProgress,
        store: bool = False,
    ) -> None:
        self._store = store
        self._out, self._runtime = out, runtime
        self._engines, self._requests, self._shown = engines, requests, shown
        self._urls = [each.url for each in engines]

    def warm_up(self) -> float:
        """Send engines some requests, one at a time; the pace that suits this machine."""
        first = self._requests[:WARMING]
        self._shown.passing("all engines", "how fast is this machine?", len(first))
        seconds = [self._alone(number, each) for number, each in enumerate(first)]
        whole_s = quantile(seconds[len(self._urls) :], 50) * len(self._requests) / LOAD
        span = self._requests[-1].at - self._requests[0].at
        return min(LONGEST_PASS_S, whole_s) / span

    def ours(self, pace: float) -> tuple[AgentPass, dict[str, int]]:
        with self._route(f"route{'-store' * self._store}.log") as route:
            return self.behind(self._ours, route.url, pace), route.status()["decisions"]

    def behind(self, arm: str, url: str, pace: float) -> AgentPass:
        return self._play(arm, [url], pace)

    def rival(self, arm: str, pick: Pick, pace: float) -> AgentPass:
        return self._play(arm, self._urls, pace, pick)

    def killed(self) -> Killed:
        """Our router's pass without pauses, in the middle of which an engine is killed."""
        with self._route("route-killed.log") as route:
            self._begin(OURS, "an engine is killed half way")
            killing = _Killing(self._engines, route)
            sender = Sender(
                [route.url], self._requests, TOLD, self._shown.answered, arm="killed",
                salted=self._store, midway=killing, tolerant=True,
            )  # fmt: skip
            passed = sender.side_by_side()
            return Killed(passed, killing.asked, killing.begun, killing.in_flight, route.status())

    @property
    def _ours(self) -> str:
        return f"{OURS}, a store" if self._store else OURS

    def _route(self, log: str) -> RouteProcess:
        return RouteProcess(self._urls, self._runtime, self._out / log)

    def _play(self, arm: str, urls: Sequence[str], pace: float, pick: Pick = only_one) -> AgentPass:
        self._begin(arm, "side by side")
        sender = Sender(
            urls, self._requests, TOLD, self._shown.answered, pace, pick, arm, self._store,
            tolerant=True,
        )  # fmt: skip
        return sender.side_by_side()

    def _alone(self, number: int, request: AgentRequest) -> float:
        """Seconds that one request takes at an idle engine."""
        url = self._urls[number % len(self._urls)]
        sender = Sender([url], [request], TOLD, self._shown.answered, arm="warm")
        return sender.one_by_one().result.wall_s

    def _begin(self, arm: str, how: str) -> None:
        """Every pass starts with empty pools, or with none of its own blocks there."""
        for each in self._engines if not self._store else ():
            each.reset_prefix_cache()
        self._shown.passing(arm, how)
