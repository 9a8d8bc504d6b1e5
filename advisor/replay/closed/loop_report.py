"""What a person sees of a closed loop: a table, and the cliff as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, Final

from rich.table import Table

from ..lab.pictures import pyplot
from .loop_arms import ADMISSION, ClosedRow

_GREY: Final = "#9aa0a6"
_COLORS: Final = ("#1a73e8", "#12a150", "#e37400", "#a142f4", "#d93025", "#00897b")


def closed_table(rows: Sequence[ClosedRow]) -> Table:
    """The rows for people."""
    table = Table(title="recorded agents in a closed loop", title_justify="left")
    for column in ("blocks", "agents", "arm"):
        table.add_column(column, justify="left" if column == "arm" else "right")
    for column in (
        "turns per hour", "computed", "TTFT of returning p50 / p95", "of first turns p50 / p95",
        "held", "longest hold", "starved", "refused",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            f"{row.capacity:,}",
            str(row.users),
            row.arm,
            f"{row.turns_per_hour:,.0f}",
            f"{row.computed:.2f}",
            f"{row.returning_p50:.1f} / {row.returning_p95:.0f} s",
            f"{row.first_p50:.1f} / {row.first_p95:.0f} s",
            f"{row.held:.3f}",
            f"{row.longest_hold:.0f} s",
            str(row.starved),
            str(row.refused),
        )
    return table


def draw_cliff(rows: Sequence[ClosedRow], path: Path) -> None:
    """Save the picture: turns per hour and TTFT over agents, a row of two a capacity.

    Raises:
        ReplayError: matplotlib is not installed.
    """
    plots = pyplot()
    capacities = sorted({row.capacity for row in rows})
    arms = list(dict.fromkeys(row.arm for row in rows if row.arm != "lru"))
    colors = {"lru": _GREY, **dict(zip(arms, cycle(_COLORS), strict=False))}
    size = (11, 4.2 * len(capacities))
    figure, grid = plots.subplots(
        len(capacities), 2, figsize=size, layout="constrained", squeeze=False
    )
    for axes, capacity in zip(grid, capacities, strict=True):
        here = [row for row in rows if row.capacity == capacity]
        _panel(axes[0], here, colors, "turns_per_hour", f"Turns per hour, {capacity:,} blocks")
        axes[0].set_ylim(bottom=0)
        _panel(axes[1], here, colors, "returning_p50", "TTFT of returning turns, p50 (s)")
        axes[1].set_yscale("log")
    grid[0][0].legend(frameon=False, fontsize=9)
    figure.suptitle("Recorded agents in a closed loop on one engine", fontweight="bold")
    figure.savefig(path, dpi=130)
    plots.close(figure)


def _panel(
    axes: Any, rows: Sequence[ClosedRow], colors: Mapping[str, str], what: str, title: str
) -> None:
    for arm in dict.fromkeys(row.arm for row in rows):
        points = sorted((row.users, getattr(row, what)) for row in rows if row.arm == arm)
        width = 2.6 if arm.endswith(ADMISSION) else 1.6
        line = {"color": colors[arm], "lw": width, "marker": "o", "ms": 4}
        axes.plot(*zip(*points, strict=True), label=arm, **line)
    axes.set_xlabel("agents")
    axes.set_xticks(sorted({row.users for row in rows}))
    axes.set_title(title, fontsize=11)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
