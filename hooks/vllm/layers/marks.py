"""Marks: the layers of one prompt on their way from the API process to the scheduler's."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from typing import Any, Final

from .layer_runs import Run

MARKS_KEY: Final = "kvgraph_layers"
"""In ``kv_transfer_params``, and beside a rendered prompt."""
MOST_RUNS: Final = 8192  # of one prompt; chosen


def marks_of(proof: str, runs: Sequence[Run]) -> dict[str, Any]:
    """Marks as they are handed over."""
    flat = [number for run in runs[:MOST_RUNS] for number in run]
    return {"proof": proof, "runs": flat}


def proven(params: object, proof: str) -> list[int] | None:
    """The marks in ``kv_transfer_params``; None if there are none that our API process made."""
    marks = params.get(MARKS_KEY) if isinstance(params, dict) else None
    if not isinstance(marks, dict) or not proof:
        return None
    presented, flat = marks.get("proof"), marks.get("runs")
    if not isinstance(presented, str) or not isinstance(flat, list):
        return None
    same = hmac.compare_digest(presented.encode("utf-8", "replace"), proof.encode())
    return flat if same else None


def runs_of(marks: Sequence[int]) -> list[Run]:
    """Proven marks as runs."""
    return [Run(*marks[at : at + 3]) for at in range(0, len(marks) - 2, 3)]
