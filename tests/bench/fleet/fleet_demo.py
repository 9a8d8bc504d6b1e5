"""The demo of a fleet: three real engines, recorded agents, our router and three others; then our
router with a store that the engines share, and an engine that is killed half way.

The first four arms have the same three engines, one sidecar beside them and empty pools. Rivals'
requests go straight to the engine that was picked; ours pass through the proxy, and its time
counts. The last two arms have three new engines that share a store, with some host memory through
which blocks go and come.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import math
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from ..agents.agents_arms import KEPT_BACK, AgentPass, Pick, longest, pool_for
from ..figures import Figures, quantile
from ..recorded.agents_forcing import OPTIONS
from ..recorded.agents_requests import SESSIONS, USERS, AgentRequest, recorded_requests
from ..serving.model import ensure_model, vocabulary_size
from ..serving.progress import DemoProgress
from ..serving.vllm_server import ONE_CORE, Server, ServerPlan
from ..serving.workload import BLOCK
from ..sidecars.sidecar_process import SidecarProcess, counted_since
from .fleet_stage import FleetStage, Killed, engine

_POINTS: Final = 160
"""Of one engine on the ring: what ketama gives a server, which made consistent hashing common."""


def round_robin() -> Pick:
    """One engine after the other, whose session it may be."""
    turns = count()
    return lambda session, running: next(turns) % len(running)


def consistent_hash(engines: int) -> Pick:
    """A session's requests all go to the engine whose point follows the session's on a ring."""
    ring = sorted(
        (_point(f"{number}-{point}"), number)
        for number in range(engines)
        for point in range(_POINTS)
    )
    places = [place for place, _ in ring]

    def pick(session: str, running: Sequence[int]) -> int:
        return ring[bisect.bisect(places, _point(session)) % len(ring)][1]

    return pick


def power_of_two(seed: int) -> Pick:
    """Of two engines at random, the one at which fewer requests run."""
    chance = random.Random(seed)

    def pick(session: str, running: Sequence[int]) -> int:
        one, other = chance.sample(range(len(running)), 2)
        return one if running[one] <= running[other] else other

    return pick


def _point(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


ENGINES: Final = 3
REQUESTS: Final = 300
SEED: Final = 1

FINDS: Final = 0.75
"""Share of the prompt that LRU would find if one engine had the pools of all three, one request
after the other: it makes the pools' size. Chosen: more than half of it can be lost by routing."""

RUNNING: Final = 1  # requests that run at once in an engine, as in the demo of one engine


HOST_GIB: Final = 1 / 64
"""Of host memory, where engines share a store: about as much as a pool; chosen."""
STORE_GIB: Final = 4


@dataclass(frozen=True, slots=True)
class FleetDemo:
    """What all arms did, ours first; ``shared``: our router before engines that share a store, of
    which they loaded ``from_store`` blocks, and in the arm with a kill, at the others,
    ``from_store_later``. ``pool``: KV blocks of each engine; ``pace``: seconds that a recorded
    second took.
    """

    out: Path
    requests: int
    pool: int
    pace: float
    arms: tuple[AgentPass, ...]
    decisions: dict[str, int]
    shared: AgentPass
    from_store: int
    from_store_later: int
    killed: Killed

    def figures(self) -> Figures:
        figures = Figures("demo-fleet")
        ours, *rivals = self.arms
        cached = max(each.result.cached_tokens for each in rivals)
        times = [quantile(each.result.ttft_ms, 95) for each in self.arms]
        figures.add("cached_over_best_rival", ours.result.cached_tokens / cached, "×", "> 1")
        figures.add("ttft_p95_over_best_rival", times[0] / min(times[1:]), "×", "≤ 1.05")
        figures.add("cached_with_store", self.shared.result.cached_tokens / cached, "×")
        figures.add("in_flight_at_kill", self.killed.in_flight, "requests")
        figures.add("failed_after_kill", self.killed.failed_before, "not begun", "0")
        figures.add("cut_by_kill", self.killed.cut, "begun")
        return figures


def run_fleet_demo(out: Path, model: str | None = None, progress: bool = True) -> FleetDemo:
    """Start the engines one after the other, play every arm, and kill an engine; logs are kept in
    ``out``. Raises ServerError: an engine or the proxy did not start; TrafficError: the recorded
    requests fit no pool; AnswerError: an engine did not give the recorded answers.
    """
    plan, requests = plan_and_requests(out, model)
    with DemoProgress(len(requests), progress) as shown:
        with running_fleet(plan, shown) as (runtime, engines, _):
            stage = FleetStage(out, runtime, engines, requests, shown)
            pace = stage.warm_up()
            ours, decisions = stage.ours(pace)
            arms = (ours, *(stage.rival(arm, pick, pace) for arm, pick in rivals()))
        with running_fleet(plan, shown, store=True) as (runtime, engines, sidecar):
            stage = FleetStage(out, runtime, engines, requests, shown, store=True)
            shared, _ = stage.ours(pace)
            loaded = _from_store(sidecar)
            killed = stage.killed()
            later = counted_since(loaded, _from_store(sidecar))
        return FleetDemo(out, len(requests), plan.blocks or 0, pace, arms, decisions, shared,
                         sum(loaded.values()), later, killed)  # fmt: skip


def plan_and_requests(
    out: Path, model: str | None = None, seed: int = SEED
) -> tuple[ServerPlan, Sequence[AgentRequest]]:
    """An engine, and the requests that all get, by ``seed``; TrafficError: they fit no pool."""
    name = model or str(ensure_model())
    requests = recorded_requests(SESSIONS, USERS, seed, REQUESTS, vocabulary_size(name))
    least = longest(requests) // BLOCK + KEPT_BACK
    together = pool_for(requests, FINDS, least, out / f"fleet-{seed}.jsonl.gz")
    pool = max(least, math.ceil(together / ENGINES))
    return ServerPlan(name, True, out, pool, longest(requests), RUNNING, options=OPTIONS), requests


@contextmanager
def running_fleet(
    plan: ServerPlan, shown: DemoProgress, store: bool = False
) -> Iterator[tuple[Path, list[Server], SidecarProcess]]:
    """Engines that run beside one sidecar: where that says so, the engines, the sidecar."""
    with ExitStack() as stack:
        runtime = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvg-")))
        sidecar = stack.enter_context(SidecarProcess(runtime, policy__guard="true"))
        settings = [*_settings(sidecar), *(_store_settings(runtime / "store") if store else ())]
        plan = replace(plan, settings=tuple(settings))
        engines = [stack.enter_context(engine(plan, n, shown)) for n in range(1, ENGINES + 1)]
        yield runtime, engines, sidecar


def _from_store(sidecar: SidecarProcess) -> dict[str, int]:
    sidecar.let_engines_report()
    return sidecar.tier_events("store_loaded")


def rivals() -> list[tuple[str, Pick]]:
    return [
        ("round robin", round_robin()),
        ("consistent hash", consistent_hash(ENGINES)),
        ("power of two", power_of_two(SEED)),
    ]


def _settings(sidecar: SidecarProcess) -> tuple[tuple[str, str], ...]:
    """One thread an engine, and no cores of its own: vLLM would bind all three to the same."""
    return (*ONE_CORE.items(), ("AITHER_KVCACHE_SIDECAR", sidecar.endpoint))


def _store_settings(path: Path) -> tuple[tuple[str, str], ...]:
    """A directory that engines share, for salted blocks too: salts keep passes apart."""
    return (
        ("AITHER_KVCACHE_WARM_GIB", str(HOST_GIB)),
        ("AITHER_KVCACHE_STORE", str(path)),
        ("AITHER_KVCACHE_STORE_GIB", str(STORE_GIB)),
        ("AITHER_KVCACHE_STORE_SALTED", "1"),
    )


FLEET_FILE: Final = "fleet.json"


def print_fleet(result: FleetDemo) -> None:
    console = Console()
    console.print(_table(result))
    for line in _lines(result):
        console.print(line, soft_wrap=True, highlight=False)


def save_fleet(result: FleetDemo) -> Path:
    killed = result.killed
    content = {
        **result.figures().as_dict(),
        "engines": ENGINES,
        "requests": result.requests,
        "pool_blocks": result.pool,
        "pace": round(result.pace, 5),
        "shared_store": {
            **details(result.shared),
            "blocks_from_store": result.from_store,
            "blocks_from_store_after_kill": result.from_store_later,
        },
        "arms": {each.arm: details(each) for each in result.arms},
        "decisions": result.decisions,
        "killed": {
            **details(killed.passed),
            "in_flight": killed.in_flight,
            "at_the_engine_not_begun": killed.asked,
            "at_the_engine_begun": killed.begun,
            "failed_not_begun": killed.failed_before,
            "failed_begun": killed.cut,
            "sent_again": killed.status["requests"]["retried"],
            "decisions": killed.status["decisions"],
        },
    }
    path = result.out / FLEET_FILE
    path.write_text(json.dumps(content, indent=2) + "\n")
    return path


def _table(result: FleetDemo) -> Table:
    title = f"{result.requests} requests of recorded agents on {ENGINES} engines, in every arm"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for column in ("cached tokens", "of prompt", "TTFT p50", "p95", "failed"):
        table.add_column(column, justify="right")
    for each in (*result.arms, result.shared):
        table.add_row(each.arm, *_cells(each))
    return table


def _cells(passed: AgentPass) -> list[str]:
    p50, p95 = (f"{quantile(passed.result.ttft_ms, share):,.0f} ms" for share in (50, 95))
    tokens = f"{passed.result.cached_tokens:,}"
    return [tokens, f"{passed.share:.1%}", p50, p95, str(len(passed.failed))]


def _lines(result: FleetDemo) -> list[str]:
    killed = result.killed
    requests = killed.status["requests"]
    return [
        f"Each engine has a pool of {result.pool} blocks; agents are "
        f"{1 / result.pace:,.0f} × as fast as recorded. The first arm's requests pass through the "
        "proxy, whose time counts; the others' go straight to an engine.",
        f"In the last arm the engines share a store, by way of {HOST_GIB * 1024:.0f} MiB of host "
        f"memory each: {result.from_store} blocks came from it.",
        f"Then, without pauses, an engine was killed half way: {killed.in_flight} requests were in "
        f"flight, {killed.asked + killed.begun} of them there, {killed.begun} with an answer "
        f"begun. {len(killed.passed.failed)} failed: {killed.cut} whose answer had begun, "
        f"{killed.failed_before} others. {requests['retried']} were sent to another engine; "
        f"the engines left loaded {result.from_store_later} blocks from the store.",
        f"  {result.out / FLEET_FILE}",
    ]


def details(passed: AgentPass) -> dict[str, Any]:
    done = passed.result
    return {
        "answered": len(done.answers),
        "failed": len(passed.failed),
        "prompt_tokens": done.prompt_tokens,
        "cached_tokens": done.cached_tokens,
        "wall_s": round(done.wall_s, 2),
        "ttft_ms": {p: round(quantile(done.ttft_ms, p), 1) for p in (50, 90, 95, 99)},
    }
