"""``kvgraph bench faults``: what holds when things go wrong, each fault by name.

A fault is a function of one of the modules below that measures its figures. Without a name all of
them run at a size that takes at most forty minutes together; ``full`` runs them at the sizes that
the figures are stated for, keeps each result in ``out``, and passes over those that are there.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console

from .errors import BenchError
from .figures import Figure, Figures

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Size:
    """How much of a fault is run.

    Attributes:
        full: At the size that its figures are stated for.
        seed: Of everything random; printed with the result.
    """

    full: bool
    seed: int

    def of(self, short: int, full: int) -> int:
        """``short``, or ``full``."""
        return full if self.full else short


Fault = Callable[[Figures, Size, Say], None]

FAULTS: Final = {
    "mutants": "faults_mutants",
    "losses": "faults_load",
    "burst": "faults_burst",
    "kills": "faults_kills",
    "snapshots": "faults_snapshots",
    "http": "faults_http",
    "churn": "faults_churn",
    "traffic": "faults_traffic",
}
"""Name → the module whose ``run`` is the fault; one that needs an engine is added here too."""


def run(names: list[str], full: bool, seed: int, out: Path, progress: bool) -> Figures:
    """Run the named faults, or all of them.

    Raises:
        BenchError: A name is none.
    """
    unknown = [name for name in names if name not in FAULTS]
    if unknown:
        raise BenchError(f"no fault is called {', '.join(unknown)}; there are {', '.join(FAULTS)}")
    console = Console(stderr=True, quiet=not progress)
    console.print(f"seed {seed}")
    size, figures = Size(full, seed), Figures("faults")
    for name in names or FAULTS:
        kept = out / f"{name}.json"
        if full and not names and _is_kept(kept):
            console.print(f"{name}: kept from {kept}")
            figures.figures.update(_figures_in(kept))
            continue
        measured = _measure(name, size, console)
        figures.figures.update(measured.figures)
        out.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps({**measured.as_dict(), "seed": seed, "full": full}, indent=1))
    return figures


def _is_kept(kept: Path) -> bool:
    """Whether a full run left its result there."""
    try:
        return bool(json.loads(kept.read_text())["full"])
    except (OSError, ValueError, KeyError):
        return False


def _figures_in(kept: Path) -> dict[str, Figure]:
    figures = json.loads(kept.read_text())["figures"]
    return {
        name: Figure(each["value"], each["unit"], tuple(each["spread"]), each["n"])
        for name, each in figures.items()
    }


def _measure(name: str, size: Size, console: Console) -> Figures:
    fault: Fault = importlib.import_module(f".{FAULTS[name]}", __package__).run
    figures = Figures(name)
    with console.status(name) as status:
        fault(figures, size, lambda text: status.update(f"{name}: {text}"))
    return figures
