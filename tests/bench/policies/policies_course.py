"""Plays cells, skips those that a journal knows, and says how it goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from kvgraph.advisor.replay.arms import run_cells
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from .policies_journal import Journal

Shared = TypeVar("Shared")
Cell = TypeVar("Cell", bound=tuple[Any, ...])
Say = Callable[[str, float], None]
"""``(what a cell found, share of the work that is done)``."""


class Course:
    """How a bench's cells are played, and where their results go.

    Args:
        journal: Is asked before a cell is played, and told afterwards.
        processes: Cells that are played at once.
        console: What people read; quiet where nobody wants to.
    """

    def __init__(self, journal: Journal, processes: int, console: Console) -> None:
        self._journal = journal
        self._processes = processes
        self._console = console

    def play(
        self,
        kind: str,
        run: Callable[[Shared, Cell], Any],
        shared: Shared,
        cells: Sequence[Cell],
        effort: Callable[[Cell], float] = lambda cell: 1.0,
    ) -> dict[Cell, Any]:
        """What each cell found; cells begin in their order.

        Args:
            kind: Tells the journal these cells from others.
            run: A function of a module, whose results JSON can hold.
            effort: How long a cell takes, beside the others.
        """
        found = {cell: self._journal.known(kind, cell) for cell in cells}
        left = [cell for cell, known in found.items() if known is None]
        with self._saying(kind, sum(map(effort, left)), len(cells) - len(left)) as say:
            for cell, result in run_cells(run, shared, left, self._processes) if left else ():
                self._journal.note(kind, cell, result)
                found[cell] = result
                shown = f": {result:.4f}" if isinstance(result, float) else ""
                say(" ".join(map(str, cell)) + shown, effort(cell))
        return found

    @contextmanager
    def _saying(self, kind: str, effort: float, known: int) -> Iterator[Say]:
        """A bar with an estimate of the time that is left; without a terminal, a line a cell."""
        if known:
            self._console.print(f"{kind}: {known} cells are known from an earlier run")
        columns = (TextColumn(kind), BarColumn(), TextColumn("{task.fields[said]}"))
        started, done, cells = time.monotonic(), 0.0, 0
        shown = Progress(*columns, console=self._console, disable=not self._console.is_terminal)
        with shown:
            task = shown.add_task(kind, total=effort, said="")

            def say(cell: str, share: float) -> None:
                nonlocal done, cells
                done, cells = done + share, cells + 1
                left_s = (time.monotonic() - started) * (effort - done) / max(done, 1e-9)
                said = f"{done / max(effort, 1e-9):.0%}, about {duration(left_s)} left"
                shown.update(task, completed=done, said=f"{said}; {cell}")
                if not self._console.is_terminal:
                    self._console.print(f"{kind}: {said}; done: {cell}")

            yield say


def duration(seconds: float) -> str:
    """A time in words of a person: seconds up to two minutes, then minutes."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
