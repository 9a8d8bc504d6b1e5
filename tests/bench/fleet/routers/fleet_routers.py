"""Our router beside round robin, a consistent hash, power of two, and Ray's that goes by prefixes:
what they find in caches, and how long the slowest prompts wait.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any, Final

from ...errors import BenchError
from ...figures import Figures
from ..fleet_stage import OURS
from ..processes.apart import has_networks, run_apart
from .ray_process import has_ray

STAGE: Final = f"{__package__}.router_stage"
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
