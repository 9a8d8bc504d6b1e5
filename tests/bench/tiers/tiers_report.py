"""What ``bench tiers`` leaves behind: the details of every arm as JSON, and one picture."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from kvgraph.advisor.replay.tables import pyplot

from ..figures import quantile
from ..serving.workload import Workload
from .tiers_arms import POOL_BLOCKS, WARM_GIB, ArmRecord, PassRecord
from .tiers_figures import TierResult, context_lost, hit_rate, returning_ttft_ms
from .tiers_workload import returning, working_set_blocks

DETAILS_FILE: Final = "tiers.json"
PICTURE_FILE: Final = "tiers.png"

_COLORS: Final = ("#9aa0a6", "#1a73e8", "#12a150", "#e8710a", "#a142f4", "#d93025")


def save_details(result: TierResult) -> Path:
    """Write figures, workload and every arm's counters; no text of any request."""
    path = result.out / DETAILS_FILE
    content = {
        **result.figures().as_dict(),
        "workload": {"pace": result.pace, **_workload_details(result.workload)},
        "arms": {name: _arm_details(arm, result.workload) for name, arm in result.arms.items()},
        "refused": result.refused,
    }
    path.write_text(json.dumps(content, indent=2) + "\n")
    return path


def draw(result: TierResult) -> Path:
    """Draw where prompt tokens came from and how long returning turns waited, as a PNG."""
    plots = pyplot()
    figure, axes = plots.subplots(1, 2, figsize=(12, 4.4), layout="constrained")
    arms = {name: arm.concurrent for name, arm in result.arms.items() if arm.concurrent}
    _draw_sources(axes[0], arms)
    _draw_ttft(axes[1], arms, result.workload)
    path = result.out / PICTURE_FILE
    figure.savefig(path, dpi=130)
    plots.close(figure)
    return path


def _draw_sources(axes: Any, arms: dict[str, PassRecord]) -> None:
    labels = {
        "local_cache_hit": ("prefix cache", "#1a73e8"),
        "external_kv_transfer": ("loaded for a waiting request", "#12a150"),
        "local_compute": ("computed", "#e8eaed"),
    }
    left = [0.0] * len(arms)
    for source, (label, color) in labels.items():
        widths = [record.sources.get(source, 0.0) / 1e3 for record in arms.values()]
        axes.barh(list(arms), widths, left=left, color=color, label=label)
        left = [before + width for before, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("thousand tokens")
    axes.set_title("Where prompt tokens came from")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3, frameon=False)
    _plain(axes)


def _draw_ttft(axes: Any, arms: dict[str, PassRecord], workload: Workload) -> None:
    for (name, record), color in zip(arms.items(), _COLORS, strict=False):
        samples = sorted(returning_ttft_ms(record.result, workload))
        shares = [100 * (i + 1) / len(samples) for i in range(len(samples))]
        axes.step(samples, shares, where="post", color=color, label=name, lw=2)
    axes.set_xlabel("ms")
    axes.set_ylabel("% of returning turns")
    axes.set_title("Time to first token after a tool pause")
    axes.legend(loc="lower right", frameon=False)
    _plain(axes)


def _plain(axes: Any) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _workload_details(workload: Workload) -> dict[str, Any]:
    needed = working_set_blocks(workload)
    return {
        "requests": len(workload.in_order()),
        "returning_turns": len(returning(workload)),
        "prompt_tokens": workload.prompt_tokens,
        "working_set_blocks": needed,
        "pool_blocks": POOL_BLOCKS,
        "pool_share": round(POOL_BLOCKS / needed, 3),
        "warm_gib": WARM_GIB,
    }


def _arm_details(arm: ArmRecord, workload: Workload) -> dict[str, Any]:
    passes = {"sequential": arm.sequential, "concurrent": arm.concurrent}
    return {
        name: _pass_details(record, workload)
        for name, record in passes.items()
        if record is not None
    }


def _pass_details(record: PassRecord, workload: Workload) -> dict[str, Any]:
    done = record.result
    ttft = returning_ttft_ms(done, workload)
    return {
        "requests": len(done.answers),
        "prompt_tokens": done.prompt_tokens,
        "computed_tokens": done.recomputed_tokens,
        "hit_rate": round(hit_rate(done), 4),
        "context_lost": round(context_lost(done, workload), 4),
        "returning_ttft_ms": {p: round(quantile(ttft, p), 1) for p in (50, 90, 95, 99)},
        "busy_share": round(sum(a.latency_s for a in done.answers) / done.wall_s, 3),
        "wall_s": round(done.wall_s, 2),
        "prompt_tokens_by_source": record.sources,
        "tiers": None if record.tiers is None else asdict(record.tiers),
    }
