"""The picture of ``kvgraph plan``: hit rate and TTFT over cost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from ..errors import ReplayError
from .fleet_plans import ROUTINGS, PlanFound

_COLORS: Final = dict(zip(ROUTINGS, ("#9a9a9a", "#4c78a8", "#e45756"), strict=True))


def draw_plans(
    found: Sequence[PlanFound], best: PlanFound | None, ttft_s: float, path: Path
) -> None:
    """Save the picture.

    Raises:
        ReplayError: matplotlib is missing, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ReplayError(
            "the picture needs matplotlib; install it with pip install 'kvgraph[replay]'"
        ) from None
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    rates, times = figure.subplots(1, 2)
    for routing in ROUTINGS:
        rows = [row for row in found if row.plan.routing == routing]
        _points(rates, rows, [row.hit_rate + row.host_rate for row in rows], routing)
        _points(times, rows, [row.ttft_p95_s for row in rows], routing)
    rates.set(xlabel="cost in engines", ylabel="share of the prompt found", ylim=(0, 1))
    times.set(xlabel="cost in engines", ylabel="TTFT p95 in seconds", yscale="log")
    times.axhline(ttft_s, color="#444444", linewidth=0.8, linestyle=":")
    if best is not None:
        times.plot([best.cost], [best.ttft_p95_s], "o", markersize=14, fillstyle="none",
                   color="#222222", label="cheapest that is fast enough")  # fmt: skip
    times.legend(frameon=False, fontsize=8)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ReplayError(f"--picture {str(path)!r}: {error}") from None


def _points(axes: Any, rows: Sequence[PlanFound], values: Sequence[float], routing: str) -> None:
    """One point per plan; hollow where there is no host memory."""
    costs = [row.cost for row in rows]
    axes.plot(costs, values, linewidth=0.6, alpha=0.4, color=_COLORS[routing])
    faces = [_COLORS[routing] if row.plan.host else "white" for row in rows]
    axes.scatter(costs, values, s=26, c=faces, edgecolors=_COLORS[routing], label=routing, zorder=3)
