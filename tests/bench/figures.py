"""The one shape in which every bench reports: named figures with a unit, a spread and a count."""

from __future__ import annotations

import datetime
import json
import logging
import math
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import eq, ge, gt, le, lt
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.table import Table

Value = float | int | bool

_BOUND: Final = re.compile(r"(?:([≤≥<>]) ?)?(-?[\d,]*\.?\d+)")
_WITHIN: Final = {"≤": le, "≥": ge, "<": lt, ">": gt, None: eq}


@dataclass(frozen=True, slots=True)
class Figure:
    value: Value  # the median of the samples, or the number itself
    unit: str  # what it is counted in: ``ms``, ``B``, ``blocks/s``, ``bool``
    # 10th and 90th percentile of the samples (their extremes below ten samples)
    spread: tuple[float, float]
    n: int  # samples behind the value
    target: str = ""  # what is to be reached, in words ("≤ 2")

    @classmethod
    def of(cls, samples: Sequence[float] | Value, unit: str, target: str = "") -> Figure:
        """A figure from samples (median and spread) or from one number."""
        if isinstance(samples, (bool, int, float)):
            return cls(samples, unit, (float(samples), float(samples)), 1, target)
        if len(samples) == 0:
            raise ValueError("a figure needs at least one sample")
        low, middle, high = np.percentile(samples, _quantiles(len(samples)))
        return cls(float(middle), unit, (float(low), float(high)), len(samples), target)

    @property
    def is_missed(self) -> bool:
        """Whether the value misses a target of one number; NaN always does, other words never."""
        if self.target in ("true", "yes"):
            return not self.value
        wanted = _BOUND.fullmatch(self.target)
        if wanted is None:
            return False
        return not _WITHIN[wanted[1]](self.value, float(wanted[2].replace(",", "")))

    def as_dict(self) -> dict[str, Any]:
        """The figure as it stands in the JSON report, rounded to six significant digits."""
        return {
            "value": _rounded(self.value),
            "unit": self.unit,
            "spread": [_rounded(bound) for bound in self.spread],
            "n": self.n,
            **({"target": self.target} if self.target else {}),
        }


@dataclass
class Figures:
    bench: str
    figures: dict[str, Figure] = field(default_factory=dict)

    def add(
        self, name: str, samples: Sequence[float] | Value, unit: str, target: str = ""
    ) -> Figure:
        figure = self.figures[name] = Figure.of(samples, unit, target)
        return figure

    def add_rounds(self, rounds: Sequence[Figures]) -> None:
        """Add each figure of several rounds as one: its median and spread over these."""
        for name, figure in rounds[0].figures.items() if rounds else ():
            values = [each.figures[name].value for each in rounds if name in each.figures]
            self.add(name, values, figure.unit, figure.target)

    def add_share(self, name: str, right: int, n: int, of: str, target: str = "") -> float:
        """A share of ``n``, with its 95 % interval by Wilson in the unit."""
        z = 1.959964
        share, spread = right / n, z * z / n
        middle = (share + spread / 2) / (1 + spread)
        half = z * math.sqrt(share * (1 - share) / n + spread / (4 * n)) / (1 + spread)
        low = max(0.0, middle - half)  # rounding may leave -0.000
        self.add(name, share, f"{of}, {low:.3f} – {middle + half:.3f}", target)
        return share

    def as_dict(self) -> dict[str, Any]:
        rows = {name: figure.as_dict() for name, figure in self.figures.items()}
        return {"bench": self.bench, "figures": rows}

    def to_json(self) -> str:
        return json.dumps(self.as_dict())

    def print(self, as_json: bool = False, console: Console | None = None) -> None:
        console = console or Console()
        if as_json:
            console.file.write(self.to_json() + "\n")
            return
        console.print(self.table())

    def table(self) -> Table:
        table = Table(title=f"kvgraph bench {self.bench}", title_justify="left")
        table.add_column("figure", overflow="fold")  # whole: docs call figures by these names
        for column in ("value", "spread", "n", "target"):
            table.add_column(column, justify="right")
        for name, figure in self.figures.items():
            target = f"{figure.target}: missed" if figure.is_missed else figure.target
            table.add_row(name, _shown(figure), _spread(figure), str(figure.n), target)
        return table


def at_least(bound: float, digits: int = 1) -> str:
    """A target, rounded down: what equals the bound is no miss."""
    scale = 10**digits
    return f"≥ {math.floor(bound * scale) / scale:.{digits}f}"


def quantile(samples: Sequence[float], percentile: float) -> float:
    return float(np.percentile(samples, percentile))


def _quantiles(n: int) -> tuple[float, float, float]:
    return (10.0, 50.0, 90.0) if n >= 10 else (0.0, 50.0, 100.0)


def _rounded(value: Value) -> Value:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _shown(figure: Figure) -> str:
    if isinstance(figure.value, bool):
        return "yes" if figure.value else "no"
    return f"{_number(figure.value)} {figure.unit}"


def _spread(figure: Figure) -> str:
    if figure.n == 1:
        return ""
    return " – ".join(map(_number, figure.spread))


def _number(value: float) -> str:
    """Four digits; all of a larger number's, since ``g`` would write a count as ``1e+05``."""
    return f"{value:,.0f}" if abs(value) >= 9999.5 else f"{value:,.4g}"


def keep_raw(path: Path, facts: Mapping[str, Any]) -> None:
    """Write a raw file. Where that fails, say so and go on: what was measured is printed still."""
    try:
        path.write_text(json.dumps(facts, indent=1) + "\n")
    except OSError as error:
        problem = f"not kept: {path} cannot be written: {error.strerror}"
        Console(stderr=True).print(problem, style="red", markup=False, soft_wrap=True)


def measured_now() -> dict[str, str]:
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
        "machine": machine(),
        "python": platform.python_version(),
        "command": " ".join(["kvgraph", *sys.argv[1:]]),
    }


def machine() -> str:
    """The machine, in words: its processor, cores and system."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        model = platform.machine()
    return f"{os.cpu_count()} × {model}, {platform.system()} {platform.machine()}, no GPU used"


@contextmanager
def only_errors() -> Iterator[None]:
    """Log nothing below an error: vLLM sets the levels of its loggers anew whenever it likes."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
