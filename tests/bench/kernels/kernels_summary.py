"""The figures that targets speak of, from the cells that a GPU's matrix is made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

LARGE: Final = 8 << 20  # bf16 bytes from which bandwidth, not launching, is the limit
_COPIES: Final = ("batched_copy", "vllm_swap", "index_copy")  # who leaves the bytes of a warm
_TURNS: Final = ("copy_then_rotate", "three_passes")  # and those of a splice
SOLO_SLACK: Final = 1.15
SOLO_SECONDS: Final = 10e-6


@dataclass(frozen=True)
class Measured:
    """One figure.

    Attributes:
        samples: One a cell, or one a repetition.
        target: What is to be reached, in words.
    """

    name: str
    samples: list[float]
    unit: str
    target: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Median, extremes and count."""
        low, middle, high = (float(f"{x:.5g}") for x in np.percentile(self.samples, (0, 50, 100)))
        return {
            "value": middle, "unit": self.unit, "spread": [low, high], "n": len(self.samples),
            "target": self.target,
        }  # fmt: skip


def summary(
    rows: list[dict[str, Any]], prefill: dict[str, list[float]], solo: tuple[int, list[float]],
    peak: float,
) -> list[Measured]:  # fmt: skip
    """The figures; those that nothing was measured for are left out.

    Args:
        rows: Cells as the report has them.
        prefill: Microseconds of ``splice`` and ``prefill`` of the same tokens, in turns.
        solo: Bytes of a splice of 64 blocks, and its seconds from an idle device.
        peak: The copy engine's bytes a second, from host to GPU.
    """
    size, seconds = solo
    limit = SOLO_SLACK * size / peak + SOLO_SECONDS
    warm = [row["times"]["warm"]["gb_per_s"] * 1e9 / peak for row in _large(rows, "bf16", "warm")]
    over = [
        row["times"]["splice"]["us"] / row["times"]["warm"]["us"]
        for row in _large(rows, "bf16", "warm", "splice")
    ]
    int8 = [
        row["times"]["splice"]["bf16_gb_per_s"] * 1e9 / peak
        for row in _large(rows, "int8", "splice")
    ]
    equal = [float(row["equals_reference"]) for row in rows if "equals_reference" in row]
    turns = zip(prefill.get("prefill", []), prefill.get("splice", []), strict=True)
    made = [
        Measured("copy_engine_gb_per_s", [peak / 1e9], "GB/s"),
        Measured("warm_of_copy_engine", warm, "of peak", "≥ 0.95"),
        Measured("warm_of_copy_engine_worst", _worst(warm, min), "of peak", "≥ 0.95"),
        Measured("warm_over_best_rival", _over_rivals(rows, "warm", _COPIES), "× time", "≤ 1"),
        Measured("splice_over_best_rival", _over_rivals(rows, "splice", _TURNS), "× time", "≤ 1"),
        Measured("splice_over_warm", over, "× time", "≤ 1.02"),
        Measured("splice_over_warm_worst", _worst(over, max), "× time", "≤ 1.02"),
        Measured("splice_int8_of_copy_engine", int8, "of peak, as bf16 bytes", "≥ 1.8"),
        Measured("splice_int8_worst", _worst(int8, min), "of peak, as bf16 bytes", "≥ 1.8"),
        Measured("splice_64_of_limit", [s / limit for s in seconds], "of 1.15×+10 µs", "≤ 1"),
        Measured("splice_vs_prefill_1280", [p / s for p, s in turns], "×", "≥ 10"),
        Measured("equals_reference", _worst(equal, min), "share of cells", "1"),
    ]  # fmt: skip
    return [figure for figure in made if figure.samples]


def _large(rows: list[dict[str, Any]], dtype: str, *names: str) -> Iterator[dict[str, Any]]:
    """Aligned cells of at least ``LARGE`` bytes of bf16 in which all of the names were measured."""
    for row in rows:
        times = row.get("times", {})
        measured = all("us" in times.get(name, {}) for name in names)
        if row["dtype"] == dtype and row["aligned"] and row["bf16_bytes"] >= LARGE and measured:
            yield row


def _over_rivals(rows: list[dict[str, Any]], ours: str, rivals: tuple[str, ...]) -> list[float]:
    """Our time over that of the fastest rival, in each cell that has one."""
    ratios = []
    for row in _large(rows, "bf16", ours):
        theirs = [row["times"][name]["us"] for name in rivals if "us" in row["times"].get(name, {})]
        if theirs:
            ratios.append(row["times"][ours]["us"] / min(theirs))
    return ratios


def _worst(samples: list[float], which: Any) -> list[float]:
    return [which(samples)] if samples else []
