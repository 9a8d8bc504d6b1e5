"""The arms of ``bench agents --closed``: how each server is started, and what it did."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ..agents.agents_arms import HOST_LRU, AgentArm, Room
from ..agents.agents_pass import Telling
from ..serving.progress import DemoProgress
from ..serving.vllm_server import Server, check_advised
from .closed_pass import Clock, ClosedPass, closed_loop
from .closed_sidecar import HoldCounts, hold_counts
from .closed_users import Script

_HOLD: Final = ("AITHER_KVCACHE_ADMISSION", "1")

LONGEST_FIRST: Final = "kvgraph_bench.serving.longest_prefix.LongestPrefixFirst"
"""A scheduler class, as vLLM takes it by name."""

STOCK: Final = AgentArm("stock", graph=False)
LPM: Final = AgentArm("lpm", graph=False, options=("--scheduler-cls", LONGEST_FIRST))
"""Stock, but who waits starts by the longest cached prefix: SGLang's order."""
OFF: Final = AgentArm("off", graph=True, settings=(("AITHER_KVCACHE_ADMISSION", "0"),))
HOLD: Final = AgentArm("hold", graph=True, settings=(_HOLD,))
HOLD_TOLD: Final = AgentArm(
    "hold_told", graph=True, telling=Telling(hinted=True), settings=(_HOLD,)
)
"""Clients name their sessions, and say when they end or wait for a tool."""
HOST_HOLD: Final = AgentArm("host_hold", graph=True, hosted=True, settings=(_HOLD,))
CLOSED_ARMS: Final = (STOCK, LPM, OFF, HOLD, HOLD_TOLD, HOST_LRU, HOST_HOLD)


@dataclass(frozen=True, slots=True)
class ClosedRun:
    """One arm, once.

    Attributes:
        held: What the engine's sidecar counted; None without one.
    """

    arm: str
    agents: int
    passed: ClosedPass
    held: HoldCounts | None


def run_closed(
    arm: AgentArm, room: Room, users: Sequence[Script], clock: Clock, shown: DemoProgress
) -> ClosedRun:
    """Start the arm's server, let the users play, end it.

    Raises:
        ServerError: It did not start, or a graph's arm ran without its graph.
        AnswerError: The server did not give the recorded answers.
    """
    tag = f"{arm.name}-{len(users)}"
    shown.starting(tag)
    with Server(room.plan(arm, tag)) as server:
        if arm.graph:
            check_advised(server)
        shown.passing(tag, f"{len(users)} agents")
        passed = asyncio.run(closed_loop(server.url, users, arm.telling, clock, shown.answered))
        return ClosedRun(arm.name, len(users), passed, hold_counts(server) if arm.graph else None)
