"""Tiers on a real vLLM: agents that wait for tools, under memory pressure, arm by arm.

Every arm gets the same requests: first one at a time (are the texts those of stock?), then with
the agents' pauses (who still has their context when they come back?). A last part has no memory
pressure at all and measures what tiers cost an engine that needs none.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Final

from rich.console import Console

from ..engine.engine_rounds import CONCURRENCY, throughput_pairs
from ..errors import ServerError
from ..serving.model import ensure_model, vocabulary_size
from ..serving.progress import DemoProgress
from ..serving.workload import Workload
from .tiers_arms import ARMS, RIVALS, STOCK, TIERS, Arm, ArmRecord, measured_pace, run_arm
from .tiers_figures import IdleRates, TierResult
from .tiers_workload import build_tier_workload, paced, shortened

SEQUENTIAL_TURNS: Final = 3
"""Turns of each session in the sequential pass: enough for all to be forgotten and return."""

_RAISED: Final = re.compile(r"^\(.*\] (\w+(?:Error|Exception): .*?)(?:, please check .*)?$", re.M)


class Part(StrEnum):
    """What of the bench to run."""

    ALL = "all"
    TEXTS = "texts"
    PRESSURE = "pressure"
    IDLE = "idle"


def run(
    progress: bool = True,
    pairs: int = 6,
    model: str | None = None,
    out: Path = Path(".tiers"),
    part: Part = Part.ALL,
    arms: Sequence[Arm] = ARMS,
    pace: float | None = None,
) -> TierResult:
    """Run ``part`` of the bench; logs are kept in ``out``.

    Args:
        pairs: Rounds without memory pressure, of either server.
        arms: Stock first.
        pace: Factor on the script's pauses; None: measured, by how fast the stock server is here.

    Raises:
        ServerError: A server did not start, or ran without its tiers.
        CompletionError: A request was refused.
    """
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    name = model or str(ensure_model())
    workload = build_tier_workload(vocabulary_size(name))
    records: dict[str, ArmRecord] = {}
    refused: dict[str, str] = {}
    if part is not Part.IDLE:
        with DemoProgress(len(workload.in_order()), shown=progress) as shown:
            if part is not Part.TEXTS:
                pace = pace or measured_pace(STOCK.plan(name, out), workload, shown)
                workload = paced(workload, pace)
            for arm in arms:
                records[arm.name] = _run(arm, name, workload, out, part, shown)
            if part in (Part.ALL, Part.PRESSURE):
                _try_rivals(name, workload, out, shown, records, refused)
    idle = _idle(name, out, pairs, progress) if part in (Part.ALL, Part.IDLE) else None
    return TierResult(name, out, workload, records, idle, refused, pace)


def _run(
    arm: Arm, model: str, workload: Workload, out: Path, part: Part, shown: DemoProgress
) -> ArmRecord:
    sequential = None if part is Part.PRESSURE else shortened(workload, SEQUENTIAL_TURNS)
    concurrent = None if part is Part.TEXTS else workload
    return run_arm(arm.plan(model, out), arm.tiers, sequential, concurrent, shown)


def _try_rivals(
    model: str,
    workload: Workload,
    out: Path,
    shown: DemoProgress,
    records: dict[str, ArmRecord],
    refused: dict[str, str],
) -> None:
    """vLLM's own offloading under the same pressure; on most CPU builds it refuses to start."""
    for arm in RIVALS:
        try:
            records[arm.name] = run_arm(arm.plan(model, out), False, None, workload, shown)
        except ServerError:
            log = out / f"{arm.name}.log"
            refused[arm.name] = reason(log.read_text(errors="replace"))


def reason(log: str) -> str:
    """The first exception in a server's log, without what the logger puts before it."""
    found = _RAISED.search(log)
    return found.group(1) if found else "no exception in its log"


def _idle(model: str, out: Path, pairs: int, progress: bool) -> IdleRates:
    stock, tiers = (
        replace(arm.plan(model, out, blocks=None), max_num_seqs=CONCURRENCY)
        for arm in (STOCK, TIERS)
    )
    console = Console(stderr=True, quiet=not progress)
    return IdleRates(*throughput_pairs(stock, tiers, pairs, console))
