"""What ``bench agents --closed`` leaves behind: every run in numbers, as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from ..figures import quantile
from ..machine import measured_now
from .closed_arms import ClosedRun
from .closed_figures import ClosedResult

CLOSED_FILE: Final = "closed.json"


def save_closed(result: ClosedResult) -> Path:
    """Write figures and runs, with the date and the command."""
    clock = result.scale.clock
    content = {
        **result.figures().as_dict(),
        **measured_now(),
        "best": result.best,
        "pool": result.pool,
        "block": result.block,
        "clock": asdict(clock),
        "runs": [_run_details(run) for run in result.runs],
        "newcomers": [asdict(run) for run in result.newcomers],
    }
    path = result.out / CLOSED_FILE
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def _run_details(run: ClosedRun) -> dict[str, Any]:
    passed = run.passed
    return {
        "arm": run.arm,
        "agents": run.agents,
        "turns": len(passed.counted),
        "turns_per_minute": round(passed.turns_per_minute, 1),
        "cached_share": round(passed.cached_share, 4),
        "ttft_later_s": _quantiles(passed.ttft_s(False)),
        "ttft_first_s": _quantiles(passed.ttft_s(True)),
        "sessions_begun": len(passed.ttft_s(True)),
        "waiting_at_end": len(passed.waiting_s),
        "failed": passed.failed,
        "held": None if run.held is None else asdict(run.held),
    }


def _quantiles(samples: Sequence[float]) -> dict[int, float] | None:
    return {p: round(quantile(samples, p), 3) for p in (50, 95, 100)} if samples else None
