"""The demo's picture: what was cached, what was evicted, and how long the first token took."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from ..graph.types import PROTECTED_LAYERS, SourceLayer
from .demo import DemoResult
from .report import PICTURE_FILE

COLORS: Final = {"stock": "#9aa0a6", "graph": "#1a73e8"}
_RECOMPUTED: Final = "#e8eaed"


def draw(result: DemoResult) -> Path:
    """Draw the three panels and save them as a PNG in ``result.out``."""
    import matplotlib

    matplotlib.use("Agg")  # no display is needed, and none is opened
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(15, 4.6), layout="constrained")
    _draw_tokens(axes[0], result)
    _draw_evictions(axes[1], result)
    _draw_ttft(axes[2], result)
    figure.suptitle(
        "The same agent workload on vLLM: its own eviction, and by the graph's ranking",
        fontweight="bold",
    )
    path = result.out / PICTURE_FILE
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path


def _draw_tokens(axes: Any, result: DemoResult) -> None:
    for row, arm in enumerate(reversed(result.arms)):
        cached = (arm.sequential.cached_tokens + arm.concurrent.cached_tokens) / 1e3
        total = (arm.sequential.prompt_tokens + arm.concurrent.prompt_tokens) / 1e3
        axes.barh(row, cached, color=COLORS[arm.arm])
        axes.barh(row, total - cached, left=cached, color=_RECOMPUTED)
        axes.text(cached / 2, row, f"{arm.hit_rate:.1%} cached", ha="center", va="center")
        axes.text((cached + total) / 2, row, "recomputed", ha="center", va="center")
    axes.set_yticks(range(2), [arm.arm for arm in reversed(result.arms)])
    axes.set_title("Prompt tokens (thousands)")
    _plain(axes)


def _draw_evictions(axes: Any, result: DemoResult) -> None:
    layers = [layer for layer in SourceLayer if any(arm.evicted[layer] for arm in result.arms)]
    for offset, arm in zip((-0.2, 0.2), result.arms, strict=True):
        rows = [row + offset for row in range(len(layers))]
        bars = axes.barh(rows, [arm.evicted[x] for x in layers], 0.38, color=COLORS[arm.arm])
        axes.bar_label(bars, padding=2, fontsize=8)
        bars.set_label(arm.arm)
    names = [x.name.lower() + (" ◆" if x in PROTECTED_LAYERS else "") for x in layers]
    axes.set_yticks(range(len(layers)), names)
    axes.invert_yaxis()
    axes.legend(loc="lower right", frameon=False)
    axes.set_title("Blocks evicted by source layer (◆ protected)")
    _plain(axes)


def _draw_ttft(axes: Any, result: DemoResult) -> None:
    for arm in result.arms:
        samples = sorted(arm.concurrent.ttft_ms)
        shares = [100 * (i + 1) / len(samples) for i in range(len(samples))]
        axes.step(samples, shares, where="post", color=COLORS[arm.arm], label=arm.arm, lw=2)
    axes.set_xlabel("ms")
    axes.set_ylabel("% of requests")
    axes.legend(loc="lower right", frameon=False)
    axes.set_title("Time to first token, all at once")
    _plain(axes)


def _plain(axes: Any) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
