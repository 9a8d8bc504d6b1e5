"""What `kvgraph bench policies` found so far, cell by cell, in a file that a later run goes on
from.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from kvgraph.advisor.replay.arms import run_cells
from kvgraph.advisor.replay.trace import Trace
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from ..errors import InputError

DEFAULT: Final = Path(".bench") / "policies.jsonl"
_SOURCES: Final = Path(__file__).parents[3]
_PLAYED: Final = ("graph", "advisor/policies", "advisor/replay", "advisor/admission")
"""Folders whose code decides what a cell finds."""

Cell = Sequence[Any]


class Journal:
    """A line for every cell that was played, written as soon as it is done."""

    def __init__(self, path: Path, of: str, resume: bool) -> None:
        self._path = path
        self._found: dict[str, Any] = {}
        if resume and path.exists():
            self._read(of)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("")  # an interruption may have cut its last line
        except OSError as error:
            raise InputError(f"{path}: cannot be written: {error.strerror}") from error
        self._write({"of": of})
        for cell, found in self._found.items():
            self._write({"cell": cell, "found": found})

    def __len__(self) -> int:
        return len(self._found)

    def known(self, kind: str, cell: Cell) -> Any | None:
        """What a cell found, as JSON gives it; None: it was not played yet."""
        return self._found.get(_name(kind, cell))

    def note(self, kind: str, cell: Cell, found: Any) -> None:
        """Write down what a cell found: numbers, or a mapping of some."""
        self._found[_name(kind, cell)] = found
        self._write({"cell": _name(kind, cell), "found": found})

    def _write(self, line: Mapping[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _read(self, of: str) -> None:
        lines = _whole_lines(self._path)
        if not lines or lines[0].get("of") != of:
            raise InputError(
                f"{self._path}: is of other traffic or of another version of the code; "
                "start anew without --resume, or name another file with --journal"
            )
        self._found = {line["cell"]: line["found"] for line in lines[1:]}


def fingerprint(traces: Mapping[str, Trace], more: str = "") -> str:
    """A digest of traffic, and of the code that plays it: equal ones find the same in a cell."""
    digest = hashlib.sha256(more.encode())
    for name, trace in sorted(traces.items()):
        digest.update(f"{name} {len(trace)} {trace.has_sessions}".encode())
        for column in (trace.at, trace.blocks, trace.starts, trace.output_tokens):
            digest.update(column.tobytes())
    for folder in _PLAYED:
        for path in sorted((_SOURCES / folder).rglob("*")):
            if path.suffix in (".py", ".npz"):
                digest.update(path.read_bytes())
    return digest.hexdigest()


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a journal; one that an interruption cut is left out."""
    try:
        text = path.read_text()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    lines = text.split("\n")[:-1]
    try:
        return [json.loads(line) for line in lines]
    except ValueError as error:
        raise InputError(f"{path}: is no journal of this bench: {error}") from error


def _name(kind: str, cell: Cell) -> str:
    return json.dumps([kind, *cell])


Shared = TypeVar("Shared")
Played = TypeVar("Played", bound=tuple[Any, ...])


class Course:
    """How a bench's cells are played, and where their results go."""

    def __init__(self, journal: Journal, processes: int, console: Console) -> None:
        self._journal = journal
        self._processes = processes
        self._console = console

    def play(
        self,
        kind: str,
        run: Callable[[Shared, Played], float],
        shared: Shared,
        cells: Sequence[Played],
        effort: Callable[[Played], float] = lambda cell: 1.0,
    ) -> dict[Played, float]:
        """What each cell found; cells begin in their order."""
        known = {cell: self._journal.known(kind, cell) for cell in cells}
        found = {cell: rate for cell, rate in known.items() if rate is not None}
        left = [cell for cell in cells if cell not in found]
        if found:
            self._console.print(f"{kind}: {len(found)} cells are known from an earlier run")
        columns = (
            TextColumn(kind),
            BarColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[said]}"),
        )
        with Progress(*columns, console=self._console) as shown:
            task = shown.add_task(kind, total=sum(map(effort, left)), said="")
            for cell, result in run_cells(run, shared, left, self._processes) if left else ():
                self._journal.note(kind, cell, result)
                found[cell] = result
                name = " ".join(map(str, cell))
                shown.update(task, advance=effort(cell), said=f"{name}: {result:.4f}")
        return found
