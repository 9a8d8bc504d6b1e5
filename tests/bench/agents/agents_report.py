"""What ``bench agents`` leaves behind: the details of every run as JSON; no text of any request."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from ..figures import quantile
from ..recorded.agents_requests import SHRINK, AgentRequest
from ..serving.workload import BLOCK
from .agents_arms import AgentRun
from .agents_busy import BusyRun
from .agents_figures import AgentsResult
from .agents_lab import LabRun

DETAILS_FILE: Final = "agents.json"


def save_details(result: AgentsResult) -> Path:
    """Write figures, fleet, and what every request found: in the engine, and in the lab."""
    path = result.out / DETAILS_FILE
    content = {
        **result.figures().as_dict(),
        "fleet": _fleet_details(result),
        "runs": [_run_details(run, result.requests) for run in result.runs],
        "lab": [_lab_details(run) for run in result.lab],
        "busy": None if result.busy is None else _busy_details(result.busy),
    }
    path.write_text(json.dumps(content) + "\n")
    return path


def late_s(run: AgentRun, requests: Sequence[AgentRequest]) -> list[float]:
    """Seconds by which each request was sent after it was due; empty if no clock was followed."""
    if run.pace is None:
        return []
    due = [run.pace * (request.at - requests[0].at) for request in requests]
    return [sent - at for sent, at in zip(run.passed.sent_s, due, strict=True)]


def _fleet_details(result: AgentsResult) -> dict[str, Any]:
    requests = result.requests
    return {
        "requests": len(requests),
        "sessions": len({request.session for request in requests}),
        "ends": sum(request.ended for request in requests),
        "tool_calls": sum(bool(request.waiting) for request in requests),
        "prompt_tokens": sum(len(request.prompt) for request in requests),
        "answer_tokens": sum(len(request.answer) for request in requests),
        "recorded_s": round(requests[-1].at - requests[0].at, 1),
        "shrink": SHRINK,
        "block": BLOCK,
        "pools": result.pools,
        "pace": result.pace,
    }


def _run_details(run: AgentRun, requests: Sequence[AgentRequest]) -> dict[str, Any]:
    done, late = run.passed.result, late_s(run, requests)
    return {
        "arm": run.arm,
        "pool": run.pool,
        "host": run.host,
        "share": round(run.passed.share, 5),
        "computed_tokens": done.recomputed_tokens,
        "wall_s": round(done.wall_s, 1),
        "busy_share": round(sum(a.latency_s for a in done.answers) / done.wall_s, 3),
        "late_s": {p: round(quantile(late, p), 2) for p in (50, 95)} if late else None,
        "ttft_ms": {p: round(quantile(done.ttft_ms, p), 1) for p in (50, 95)},
        "prompt_tokens_by_source": run.own.sources,
        "mean_served_s": round(run.own.mean_served_s, 4),
        "took_s": [round(took, 4) for took in run.took_s()],
        "sent_s": [round(at, 3) for at in run.passed.sent_s],
        "cached_blocks": [answer.cached_tokens // BLOCK for answer in done.answers],
    }


def _lab_details(run: LabRun) -> dict[str, Any]:
    return {
        "policy": run.policy,
        "pool": run.pool,
        "share": round(run.share, 5),
        "cached_blocks": np.asarray(run.hits).tolist(),
    }


def _busy_details(run: BusyRun) -> dict[str, Any]:
    tally = run.tally
    return {
        "pool": run.pool,
        "protected": run.protected,
        "kept": run.kept,
        "share": round(run.passed.share, 5),
        "wall_s": round(run.passed.result.wall_s, 1),
        "evicted": {layer.name.lower(): count for layer, count in tally.evicted.items() if count},
        "missed_event_batches": tally.missed_batches,
    }
