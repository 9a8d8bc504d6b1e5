"""What ``kill -9`` of an engine, the sidecar, a router, the store's master and its owner costs."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any, Final

from ...errors import BenchError
from ...figures import Figures
from .mooncake_processes import APART, why_not

BEGUN_THERE: Final = ("engine", "router")
"""Killed ones that pass answers on: one that had begun there is cut."""

_LONGEST_S: Final = 900.0
_TAIL: Final = 12  # lines of what a stage said, where it failed; chosen


def add_kills(figures: Figures, say: Callable[[str], None]) -> dict[str, dict[str, Any]]:
    """Kill each part of a fleet of real engines with requests in flight.

    Returns:
        What came of each wave, by what was killed in it.

    Args:
        say: Told what each kill did.

    Raises:
        BenchError: Mooncake does not run here, or the stage broke.
    """
    if reason := why_not():
        raise BenchError(f"the store's master and owner cannot be killed: {reason}")
    breaker = in_a_network_of_its_own("breaker")
    with tempfile.TemporaryDirectory(prefix="kvg-") as folder:
        waves = in_a_network_of_its_own(folder)
    for name, facts in waves.items():
        say(f"{name} killed: {facts}")
    add_waves(figures, waves)
    figures.add("breaker_s", breaker["longest_s"], "s", "< 1")
    figures.add("waited_for_dead_store", breaker["requests"], f"of {breaker['asked']} requests")
    return waves


def add_waves(figures: Figures, waves: dict[str, dict[str, Any]]) -> None:
    """Add what came of each wave, by what was killed in it."""
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


def in_a_network_of_its_own(what: str) -> dict[str, Any]:
    """Run the stage where nobody else can reach the store's clients.

    Raises:
        BenchError: It broke; with the end of what it said.
    """
    command = [*APART, sys.executable, "-P", "-m", f"{__package__}.kill_stage", what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LONGEST_S)
    lines = [each for each in done.stdout.splitlines() if each.startswith("RESULT ")]
    if not lines:
        raise BenchError("the kills broke:\n" + "\n".join(done.stderr.splitlines()[-_TAIL:]))
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return found
