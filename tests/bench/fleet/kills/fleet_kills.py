"""What ``kill -9`` of an engine, the sidecar, a router, the store's master and its owner costs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any, Final

from ...errors import BenchError
from ...figures import Figures
from ..processes.apart import run_apart
from .mooncake_processes import why_not

BEGUN_THERE: Final = ("engine", "router")
"""Killed ones that pass answers on: one that had begun there is cut."""

STAGE: Final = f"{__package__}.kill_stage"
LONGEST_S: Final = 900.0


def add_kills(figures: Figures, say: Callable[[str], None]) -> dict[str, dict[str, Any]]:
    """Kill each part of a fleet of real engines with requests in flight; returns what came of each
    wave, by what was killed in it. Raises BenchError: Mooncake does not run here, or the stage
    broke.
    """
    if reason := why_not():
        raise BenchError(f"the store's master and owner cannot be killed: {reason}")
    breaker = run_apart(STAGE, "breaker", say, LONGEST_S)
    with tempfile.TemporaryDirectory(prefix="kvg-") as folder:
        waves = run_apart(STAGE, folder, say, LONGEST_S)
    add_waves(figures, waves)
    figures.add("breaker_s", breaker["longest_s"], "s", "< 1")
    figures.add("waited_for_dead_store", breaker["requests"], f"of {breaker['asked']} requests")
    return waves


def add_waves(figures: Figures, waves: dict[str, dict[str, Any]]) -> None:
    failed = {name: failed_in(name, facts) for name, facts in waves.items()}
    figures.add("failed_after_kill", sum(failed.values()), "requests", "0")
    figures.add("in_flight_at_kill", min(each["in_flight"] for each in waves.values()), "requests",
                ">= 20")  # fmt: skip
    for name in BEGUN_THERE:
        figures.add(f"cut_by_kill_of_{name}", waves[name]["cut"], "begun there")
    figures.add("asked_again_after_router", waves["router"]["asked_again"], "requests")
    for name, facts in waves.items():
        figures.add(f"store_loaded_{name}", facts["store_loaded"], "blocks")


def failed_in(name: str, facts: dict[str, Any]) -> int:
    """Requests that failed though no answer of theirs had begun at what was killed."""
    cut: int = 0 if name in BEGUN_THERE else facts["cut"]
    failed: int = facts["failed"]
    return failed + cut
