"""The demo: recorded coding agents on a real vLLM: stock, with the graph, and with hints.

Stock is first asked everything one by one, as fast as it can: so the pace is found at which users
who work in parallel keep this machine busy and do not overload it. Then every arm gets the same
requests by the fleet's clock, sessions side by side.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from ...graph.types import SourceLayer
from ..agents.agents_arms import DEFAULT, STOCK, AgentArm, Room, longest
from ..agents.agents_lab import KEPT_BACK, pool_for
from ..agents.agents_pass import AgentPass, Telling, one_by_one, side_by_side
from ..agents.agents_watch import layers_by_block, watched
from ..figures import Figures, quantile
from ..recorded.agents_fleet import SESSIONS, USERS, pace_of, recorded_requests
from ..recorded.agents_requests import AgentRequest
from ..serving.cache_ledger import Digest, Tally
from ..serving.model import ensure_model, vocabulary_size
from ..serving.progress import DemoProgress
from ..serving.workload import BLOCK
from .live_page import ENDPOINT, LivePage

REQUESTS: Final = 600
SEED: Final = 1

STOCK_FINDS: Final = 0.6
"""Share of the prompt that stock finds, one request after the other: it makes the pool's size."""

RUNNING: Final = 1
"""Requests that run at once: more would hold most of so small a pool while they run."""

HINTS: Final = AgentArm("hints", graph=True, telling=Telling(hinted=True, layered=True))
ARMS: Final = (STOCK, replace(DEFAULT, name="no hints"), HINTS)


@dataclass(frozen=True, slots=True)
class ArmResult:
    """What one arm did, and what its cache lost meanwhile."""

    arm: str
    passed: AgentPass
    tally: Tally

    @property
    def hit_rate(self) -> float:
        """Share of all prompt tokens that came out of the prefix cache."""
        return self.passed.share

    @property
    def ttft_ms(self) -> list[float]:
        """Time to first token of every request, in milliseconds."""
        return self.passed.result.ttft_ms


@dataclass(frozen=True, slots=True)
class DemoResult:
    """All arms, stock first, and where logs, picture and figures lie.

    Attributes:
        pool: KV blocks that every arm got.
        pace: Seconds that a recorded second took.
    """

    model: str
    out: Path
    requests: int
    pool: int
    pace: float
    arms: tuple[ArmResult, ...]

    def figures(self) -> Figures:
        """The figures of this half alone."""
        figures = Figures("demo")
        self.add_to(figures)
        return figures

    def add_to(self, figures: Figures) -> None:
        """This half's figures of ``kvgraph bench demo``."""
        stock, plain, hints = self.arms
        figures.add("stock_share", stock.hit_rate, "share of prompt")
        gain = 100 * (hints.hit_rate - stock.hit_rate)
        figures.add("hit_gain_points", gain, "points", "> 0")
        gain = 100 * (plain.hit_rate - stock.hit_rate)
        figures.add("hit_gain_points_no_hints", gain, "points", "≥ 0")
        figures.add("protected_lost", hints.tally.protected_lost, "blocks", "below stock's")
        figures.add("stock_protected_lost", stock.tally.protected_lost, "blocks", "> 0")
        for percentile in (50, 95):
            ratio = quantile(hints.ttft_ms, percentile) / quantile(stock.ttft_ms, percentile)
            figures.add(f"ttft_p{percentile}_ratio", ratio, "hints / stock")


def run_demo(
    model: str | None, out: Path, progress: bool = True, page: LivePage | None = None
) -> DemoResult:
    """Run all arms on the same requests, one after the other.

    Args:
        model: Anything that vLLM loads; None: a small random Llama, written on first use.
        out: Where the servers' logs are kept.
        progress: Whether to show what is going on, on stderr.
        page: Engines link to its sidecar, a new one for each arm; None: to one of their own.

    Raises:
        ServerError: vLLM did not start, or an arm ran without its graph.
        CompletionError: A request was refused.
        LedgerError: vLLM's KV events could not be read.
    """
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    name = model or str(ensure_model())
    vocabulary = vocabulary_size(name)
    requests = recorded_requests(SESSIONS, USERS, SEED, REQUESTS, vocabulary)
    least = longest(requests) // BLOCK + KEPT_BACK
    pool = pool_for(requests, STOCK_FINDS, least, out / "fleet.jsonl.gz")
    room = Room(name, out, pool, longest(requests))
    with DemoProgress(len(requests), shown=progress) as shown:
        known = layers_by_block(requests, vocabulary)
        arms, pace = _run_arms(room, requests, known, shown, page)
    return DemoResult(name, out, len(requests), pool, pace, arms)


def _how_long(arm: AgentArm, requests: Sequence[AgentRequest], pace: float) -> str:
    """How a pass goes, how long it takes at least, and why the page may show nothing of it."""
    minutes = pace * (requests[-1].at - requests[0].at) / 60
    said = f"side by side, at least {minutes:.0f} min"
    return said if arm.graph else f"{said}; no graph, so the page is empty"


def _run_arms(
    room: Room,
    requests: Sequence[AgentRequest],
    known: dict[Digest, SourceLayer],
    shown: DemoProgress,
    page: LivePage | None,
) -> tuple[tuple[ArmResult, ...], float]:
    """Every arm's result, and the pace that was measured on the first."""
    done: list[ArmResult] = []
    pace: float | None = None
    for arm in ARMS:
        shown.starting(arm.name)
        plan = replace(room.plan(arm, arm.name.replace(" ", "_")), max_num_seqs=RUNNING)
        if page is not None:
            page.begin_anew()
            plan = replace(plan, settings=(*plan.settings, (ENDPOINT, page.endpoint)))
        with watched(plan, known) as (server, ledger):
            if pace is None:
                shown.passing(arm.name, "how fast is this machine?")
                first = one_by_one(server.url, requests, arm.telling, shown.answered)
                pace = pace_of(asyncio.run(first).result.wall_s, requests)
                server.reset_prefix_cache()
                ledger.take()
            shown.passing(arm.name, _how_long(arm, requests, pace))
            task = side_by_side(server.url, requests, arm.telling, shown.answered, pace)
            done.append(ArmResult(arm.name, asyncio.run(task), ledger.take()))
    assert pace is not None
    return tuple(done), pace
