"""The arms of ``bench tiers``: what each server is started with, and what it did."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import httpx
from kvgraph.hooks.tiers.ledger import TierCounts

from ..errors import ServerError
from ..serving.cache_ledger import own_counts
from ..serving.passes import PassResult, all_at_once, one_at_a_time
from ..serving.progress import DemoProgress
from ..serving.vllm_server import Server, ServerPlan, check_advised
from ..serving.workload import Workload
from .tiers_workload import CHAT_S, chats

POOL_BLOCKS: Final = 176
"""KV blocks of every arm: about a third of what the agents will ask for again."""

WARM_GIB: Final = 0.125
"""Host memory of the arms with tiers: 512 blocks of the bench's own model."""

MAX_MODEL_LEN: Final = 1536

_WARM: Final = ("AITHER_KVCACHE_WARM_GIB", str(WARM_GIB))
_NO_HOLD: Final = ("AITHER_KVCACHE_ADMISSION", "0")  # what tiers gain, and nothing else
_REACTIVE: Final = ("AITHER_KVCACHE_PREFETCH", "0")
_EVERYTHING: Final = ("AITHER_KVCACHE_SPILL", "all")
_OFFLOADING: Final = ("--kv-offloading-size", str(WARM_GIB))

_DASHBOARD: Final = re.compile(r"kvgraph: sidecar .* dashboard at (http://\S+)")
_FIRST_REPORT_S: Final = 10.0
_WARM_UP_CHATS, _PACE_CHATS = 4, 20
_PACES: Final = (0.5, 5.0)
_REPORT_S: Final = 1.5  # until the sidecar has the engine's newest report


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to start the same server."""

    name: str
    graph: bool
    settings: tuple[tuple[str, str], ...] = ()
    options: tuple[str, ...] = ()

    def plan(self, model: str, out: Path, blocks: int | None = POOL_BLOCKS) -> ServerPlan:
        """What to start; ``blocks=None`` leaves the pool's size to vLLM."""
        return ServerPlan(
            model, self.graph, out, blocks=blocks, max_model_len=MAX_MODEL_LEN, name=self.name,
            settings=self.settings, options=self.options,
        )  # fmt: skip

    @property
    def tiers(self) -> bool:
        """Whether our tiers are switched on."""
        return _WARM in self.settings


STOCK: Final = Arm("stock", graph=False)
TIERS: Final = Arm("tiers", graph=True, settings=(_NO_HOLD, _WARM))
REACTIVE: Final = Arm("reactive", graph=True, settings=(_NO_HOLD, _WARM, _REACTIVE))
SPILL_ALL: Final = Arm("spill_all", graph=True, settings=(_NO_HOLD, _WARM, _REACTIVE, _EVERYTHING))
ARMS: Final = (STOCK, TIERS, REACTIVE, SPILL_ALL)

RIVALS: Final = (
    Arm("OffloadingConnector", graph=False, options=_OFFLOADING),
    Arm(
        "SimpleCPUOffloadConnector",
        graph=False,
        settings=(("VLLM_USE_SIMPLE_KV_OFFLOAD", "1"),),
        options=_OFFLOADING,
    ),
)
"""What stock vLLM could do instead, where its back end lets it."""


def read_counts(report: Mapping[str, Any]) -> TierCounts:
    """An engine's counters, from the sidecar's JSON."""
    return TierCounts(
        **{field.name: report[field.name] for field in dataclasses.fields(TierCounts)}
    )


@dataclass(frozen=True, slots=True)
class PassRecord:
    """One pass of one arm; ``tiers`` is None where there are none."""

    result: PassResult
    sources: dict[str, float]
    tiers: TierCounts | None


@dataclass(frozen=True, slots=True)
class ArmRecord:
    """What one arm did; a pass that was not asked for is None."""

    arm: str
    sequential: PassRecord | None
    concurrent: PassRecord | None


def run_arm(
    plan: ServerPlan,
    tiers: bool,
    sequential: Workload | None,
    concurrent: Workload | None,
    shown: DemoProgress,
) -> ArmRecord:
    """Start the arm's server, pass over the workloads, end it."""
    shown.starting(plan.arm)
    with Server(plan) as server:
        if plan.graph:
            check_advised(server)
        probe = _Probe(server, tiers)
        first = probe.record(one_at_a_time, "one at a time", sequential, shown)
        if first is not None and concurrent is not None:
            server.reset_prefix_cache()
        second = probe.record(all_at_once, "with pauses", concurrent, shown)
    return ArmRecord(plan.arm, first, second)


def measured_pace(plan: ServerPlan, workload: Workload, shown: DemoProgress) -> float:
    """How slow this machine is: what a chat takes, served alone, over ``CHAT_S``; within bounds."""
    probe = chats(workload, _WARM_UP_CHATS + _PACE_CHATS)
    times: list[float] = []
    shown.starting("pace")
    with Server(plan) as server:
        shown.passing("pace", "one at a time", len(probe.in_order()))
        for session in probe.sessions:
            alone = Workload((session,))
            times.append(asyncio.run(one_at_a_time(server.url, alone, shown.answered)).wall_s)
    return min(max(median(times[_WARM_UP_CHATS:]) / CHAT_S, _PACES[0]), _PACES[1])


class _Probe:
    """Reads a server's counters around a pass."""

    def __init__(self, server: Server, tiers: bool) -> None:
        self._server = server
        self._tiers = tiers

    def record(
        self, how: Any, title: str, workload: Workload | None, shown: DemoProgress
    ) -> PassRecord | None:
        if workload is None:
            return None
        shown.passing(self._server.plan.arm, title, len(workload.in_order()))
        sources, tiers = own_counts(self._server.url).sources, self._tier_counts()
        result = asyncio.run(how(self._server.url, workload, shown.answered))
        after = own_counts(self._server.url).sources
        grown = {name: count - sources.get(name, 0.0) for name, count in after.items()}
        moved = None if tiers is None else self._after(tiers)
        return PassRecord(result, grown, moved)

    def _after(self, before: TierCounts) -> TierCounts:
        time.sleep(_REPORT_S)
        counts = self._tier_counts()
        assert counts is not None
        return counts.since(before)

    def _tier_counts(self) -> TierCounts | None:
        if not self._tiers:
            return None
        url = dashboard_url(self._server.log.read_text(errors="replace"))
        deadline = time.monotonic() + _FIRST_REPORT_S
        while time.monotonic() < deadline:
            status = httpx.get(f"{url}/status", timeout=10.0, trust_env=False).json()
            for engine in status["engines"]:
                if report := engine.get("tiers"):
                    return read_counts(report)
            time.sleep(0.5)
        raise ServerError(
            f"the arm {self._server.plan.arm} runs without tiers; the end of its log:\n"
            + self._server.log_tail()
        )


def dashboard_url(log: str) -> str:
    """Where the sidecar that an engine started for itself answers, from the engine's log."""
    found = _DASHBOARD.findall(log)
    if not found:
        raise ServerError(
            "the engine did not start a sidecar of its own, whose counters this bench reads; "
            "unset AITHER_KVCACHE_SIDECAR"
        )
    return str(found[-1]).rstrip("/")
