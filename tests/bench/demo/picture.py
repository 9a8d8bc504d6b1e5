"""The picture of what is found: cached, evicted, and how long the first token took."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from kvgraph.advisor.replay.tables import pyplot
from kvgraph.graph.types import PROTECTED_LAYERS, SourceLayer

from .demo import DemoResult
from .demo_report import picture_of

COLORS: Final = ("#9aa0a6", "#12a150", "#1a73e8")
"""One an arm, stock first."""

_RECOMPUTED: Final = "#e8eaed"
_BAR: Final = 0.27


def draw(result: DemoResult) -> Path:
    """Draw the three panels and save them as a PNG in ``result.out``."""
    plots = pyplot()
    figure, axes = plots.subplots(1, 3, figsize=(15, 4.6), layout="constrained")
    _draw_tokens(axes[0], result)
    _draw_evictions(axes[1], result)
    _draw_ttft(axes[2], result)
    figure.suptitle(
        f"The same recorded agents on {result.made_by}",
        fontweight="bold",
    )
    path = picture_of(result)
    figure.savefig(path, dpi=130)
    plots.close(figure)
    return path


def _draw_tokens(axes: Any, result: DemoResult) -> None:
    for row, (arm, color) in enumerate(zip(result.arms, COLORS, strict=True)):
        cached = arm.passed.result.cached_tokens / 1e3
        total = arm.passed.result.prompt_tokens / 1e3
        axes.barh(row, cached, color=color)
        axes.barh(row, total - cached, left=cached, color=_RECOMPUTED)
        axes.text(cached / 2, row, f"{arm.hit_rate:.1%} cached", ha="center", va="center")
        axes.text((cached + total) / 2, row, "computed", ha="center", va="center")
    axes.set_yticks(range(len(result.arms)), [arm.arm for arm in result.arms])
    axes.invert_yaxis()
    axes.set_title("Prompt tokens (thousands)")
    _plain(axes)


def _draw_evictions(axes: Any, result: DemoResult) -> None:
    layers = [x for x in SourceLayer if any(arm.tally.evicted[x] for arm in result.arms)]
    for number, (arm, color) in enumerate(zip(result.arms, COLORS, strict=True)):
        rows = [row + _BAR * (number - 1) for row in range(len(layers))]
        bars = axes.barh(rows, [arm.tally.evicted[x] for x in layers], _BAR, color=color)
        axes.bar_label(bars, padding=2, fontsize=8)
        bars.set_label(arm.arm)
    names = [x.name.lower() + (" ◆" if x in PROTECTED_LAYERS else "") for x in layers]
    axes.set_yticks(range(len(layers)), names)
    axes.invert_yaxis()
    axes.legend(loc="lower right", frameon=False)
    axes.set_title("Blocks evicted by source layer (◆ protected where callers say so)")
    _plain(axes)


def _draw_ttft(axes: Any, result: DemoResult) -> None:
    for arm, color in zip(result.arms, COLORS, strict=True):
        samples = sorted(arm.ttft_ms)
        shares = [100 * (i + 1) / len(samples) for i in range(len(samples))]
        axes.step(samples, shares, where="post", color=color, label=arm.arm, lw=2)
    axes.set_xscale("log")
    axes.set_xlabel("ms")
    axes.set_ylabel("% of requests")
    axes.legend(loc="lower right", frameon=False)
    axes.set_title("Time to first token")
    _plain(axes)


def _plain(axes: Any) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
