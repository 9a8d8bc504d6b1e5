"""Our router beside round robin, a consistent hash, power of two, and Ray's that goes by prefixes:
what they find in caches, and how long the slowest prompts wait."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from statistics import median
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
    """Let each router play the same requests before three real engines, in turn.

    Args:
        say: Told what each did.

    Returns:
        What each did in each take.

    Raises:
        BenchError: No process can get a network of its own here, or the stage broke.
    """
    if not has_networks():
        raise BenchError("no network of its own can be made here, and Ray listens beyond loopback")
    if not has_ray():
        say("Ray is not installed, and its router not among the others: pip install 'kvgraph[ray]'")
    with tempfile.TemporaryDirectory(prefix="kvg-") as folder:
        found = run_apart(STAGE, folder, say, LONGEST_S)
    add_takes(figures, found["takes"])
    return found


def add_takes(figures: Figures, takes: list[dict[str, dict[str, Any]]]) -> None:
    """Compare by the medians of all takes."""
    arms = list(takes[0])
    found = {arm: [_share(take[arm]) for take in takes] for arm in arms}
    cached = {arm: median(shares) for arm, shares in found.items()}
    waits = {arm: median(take[arm]["ttft_ms"][_P95] for take in takes) for arm in arms}
    figures.add("cached_over_best_rival", _over(cached, max), "×", "> 1")
    figures.add("ttft_p95_over_best_rival", _over(waits, min), "×", "≤ 1.05")
    figures.add("failed", sum(take[arm]["failed"] for take in takes for arm in arms), "requests")
    for arm in arms:
        name = arm.lower().replace("'", "").replace(" ", "_").replace("-", "_")
        figures.add(f"{name}_cached", found[arm], "of prompt")
        figures.add(f"{name}_ttft_p95", [take[arm]["ttft_ms"][_P95] for take in takes], "ms")


def _share(arm: dict[str, Any]) -> float:
    """Of the answered prompts' tokens: found in a cache."""
    return float(arm["cached_tokens"] / arm["prompt_tokens"])


def _over(found: dict[str, float], best: Callable[[list[float]], float]) -> float:
    """Ours, of the best of all others."""
    return found[OURS] / best([value for arm, value in found.items() if arm != OURS])
