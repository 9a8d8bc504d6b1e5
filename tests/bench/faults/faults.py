"""``kvgraph bench faults``: what holds when things go wrong, each fault by name.

A fault is a function of one of the modules below that measures its figures. Without a name all of
them run, at a size that takes about half an hour on two idle cores (estimated); ``full`` runs them
at the sizes that the figures are stated for, keeps each result in ``out``, and passes over those
that are there.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console

from ..errors import InputError
from ..figures import Figures
from .faults_record import Record, write_all

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Size:
    """How much of a fault is run: ``full``, at the size that its figures are stated for; random
    traffic for ``hours`` (None: as its figures need it); and of ``mends`` those that have the text
    ``only`` in their names or files.
    """

    full: bool
    seed: int
    hours: float | None = None
    only: str = ""

    def of(self, short: int, full: int) -> int:
        return full if self.full else short


Fault = Callable[[Figures, Size, Say], None]

FAULTS: Final = {
    "load": ".processes.faults_load:run_load",
    "losses": ".processes.faults_load:run_losses",
    "burst": ".processes.faults_burst:run",
    "stopped": ".processes.faults_stopped:run",
    "kills": ".processes.faults_kills:run",
    "engines": ".processes.faults_engines:run",
    "replays": ".data.faults_replays:run_replays",
    "late": ".data.faults_replays:run_late",
    "repeats": ".data.faults_replays:run_repeats",
    "snapshots": ".data.faults_snapshots:run",
    "disk": ".processes.faults_disk:run",
    "clock": ".processes.faults_clock:run",
    "http": ".processes.faults_http:run",
    "copies": ".data.faults_traffic:run_copies",
    "apart": ".processes.faults_apart:run",
    "churn": ".data.faults_churn:run",
    "chaos": ".processes.faults_chaos:run",
    "mutants": ".data.faults_mutants:run",
    "traffic": ".data.faults_traffic:run",
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
    """Run the named faults, or all of them; each one's record goes to ``out``. Raises BenchError: a
    name is none.
    """
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
    with console.status(name) as status:
        fault(figures, size, lambda text: status.update(f"{name}: {text}"))
    seconds = time.monotonic() - started
    console.print(f"{name}: {seconds:,.0f} s")
    return Record.of(figures, size.full, size.seed, seconds)
