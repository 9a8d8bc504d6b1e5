"""``kvgraph bench faults``: what holds when things go wrong, each fault by name.

A fault is a function of one of the modules below that measures its figures. Without a name all of
them run, at a size that takes about half an hour on two idle cores (estimated); ``full`` runs them
at the sizes that the figures are stated for, keeps each result in ``out``, and passes over those
that are there.
"""

from __future__ import annotations

import importlib
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from ..errors import InputError
from ..figures import Figure, Figures, machine


@dataclass(frozen=True, slots=True)
class Record:
    """One fault's result, and the machine's load averages over 1 and 5 minutes at its end."""

    command: str
    date: str
    device: str
    load: tuple[float, float]
    seconds: float
    full: bool
    seed: int
    figures: dict[str, Any]

    @classmethod
    def of(cls, figures: Figures, full: bool, seed: int, seconds: float) -> Record:
        rows = {
            name: figure.as_dict() | {"target": figure.target}
            for name, figure in figures.figures.items()
        }
        command = f"kvgraph bench faults {figures.bench} --seed {seed}" + " --full" * full
        one, five, _ = os.getloadavg()
        now = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
        load = (round(one, 1), round(five, 1))
        return cls(command, now, machine(), load, round(seconds, 1), full, seed, rows)

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Record | None:
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def figures_again(self) -> dict[str, Figure]:
        return {
            name: Figure(
                row["value"], row["unit"], tuple(row["spread"]), row["n"], row.get("target", "")
            )
            for name, row in self.figures.items()
        }


def write_all(records: dict[str, Record], path: Path) -> None:
    whole = {name: asdict(record) for name, record in records.items()}
    path.write_text(json.dumps({"bench": "faults", "faults": whole}, indent=1) + "\n")


Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Size:
    """How much of a fault is run: ``full``, at the size that its figures are stated for; random
    traffic for ``hours`` (None: as its figures need it); and of ``mends`` those that have the text
    ``only`` in their names or files; in ``folder``, which is its own.
    """

    full: bool
    seed: int
    hours: float | None = None
    only: str = ""
    folder: Path = Path()

    def of(self, short: int, full: int) -> int:
        return full if self.full else short


Fault = Callable[[Figures, Size, Say], None]

FAULTS: Final = {
    "load": ".faults_load:run_load",
    "losses": ".faults_load:run_losses",
    "burst": ".faults_load:run_burst",
    "stopped": ".faults_sidecar:run_stopped",
    "kills": ".faults_sidecar:run_kills",
    "engines": ".faults_engines:run",
    "replays": ".faults_replays:run_replays",
    "late": ".faults_replays:run_late",
    "repeats": ".faults_replays:run_repeats",
    "snapshots": ".faults_graph:run_snapshots",
    "disk": ".faults_machine:run_disk",
    "clock": ".faults_machine:run_clock",
    "http": ".faults_http:run_http",
    "copies": ".faults_traffic:run_copies",
    "apart": ".faults_http:run_apart",
    "churn": ".faults_graph:run_churn",
    "chaos": ".faults_chaos:run",
    "mutants": ".faults_graph:run_mutants",
    "traffic": ".faults_traffic:run",
}
"""Name → the module and the function in it that is the fault."""

BY_NAME: Final = {"mends": ".mends:run"}
"""Likewise, of those that run only when they are named: they need a clone, and hours."""


def run(
    names: list[str],
    full: bool,
    seed: int,
    out: Path,
    progress: bool,
    hours: float | None = None,
    only: str = "",
) -> Figures:
    """Run the named faults, or all; records go to ``out``. Raises InputError for another name."""
    there = {**FAULTS, **BY_NAME}
    unknown = [name for name in names if name not in there]
    if unknown:
        raise InputError(f"no fault is called {', '.join(unknown)}; there are {', '.join(there)}")
    console = Console(stderr=True, quiet=not progress)
    console.print(f"seed {seed}")
    size, figures, records = Size(full, seed, hours, only), Figures("faults"), dict[str, Record]()
    for name in names or FAULTS:
        kept = Record.read(out / f"{name}.json") if full and not names else None
        if kept is not None and kept.full:
            console.print(f"{name}: kept from {out}")
            records[name] = kept
        else:
            records[name] = _measure(name, size, console)
            records[name].write(out / f"{name}.json")
        figures.figures.update(records[name].figures_again())
    write_all(records, out / "faults.json")
    return figures


def _measure(name: str, size: Size, console: Console) -> Record:
    module, _, function = (FAULTS.get(name) or BY_NAME[name]).partition(":")
    fault: Fault = getattr(importlib.import_module(module, __package__), function)
    figures, started = Figures(name), time.monotonic()
    with console.status(name) as status, tempfile.TemporaryDirectory(prefix="kvg-") as folder:
        size = replace(size, folder=Path(folder))
        fault(figures, size, lambda text: status.update(f"{name}: {text}"))
    seconds = time.monotonic() - started
    console.print(f"{name}: {seconds:,.0f} s")
    return Record.of(figures, size.full, size.seed, seconds)
