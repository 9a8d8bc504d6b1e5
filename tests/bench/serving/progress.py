"""What the demo shows while it runs."""

from __future__ import annotations

import time
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .completions import Answer

_PRINTED_EVERY_S: Final = 10.0  # notes, where there is no terminal; chosen


class DemoProgress:
    """One line a pass, on stderr: requests answered, and the prefix cache's share so far."""

    def __init__(self, requests: int, shown: bool = True) -> None:
        self._requests = requests
        self._prompt = self._cached = 0
        self._printed = 0.0
        self._progress = Progress(
            TextColumn("{task.description:<28}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=Console(stderr=True),
            disable=not shown,
        )
        # Bars need a terminal; a log file gets a line a step.
        self._plain = shown and not self._progress.console.is_terminal
        self._task = self._progress.add_task("", total=0, visible=False, note="")

    def __enter__(self) -> DemoProgress:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._complete()
        self._progress.stop()

    def starting(self, arm: str) -> None:
        self._begin(f"{arm}: vLLM starts", None)

    def passing(self, arm: str, how: str, requests: int | None = None) -> None:
        """A pass begins; ``requests`` if it has not as many as the others, 0 if nobody knows."""
        total = self._requests if requests is None else requests
        self._begin(f"{arm}: {how}", total or None)

    def answered(self, answer: Answer) -> None:
        self._prompt += answer.prompt_tokens
        self._cached += answer.cached_tokens
        share = self._cached / self._prompt
        self._progress.update(self._task, advance=1, note=f"{share:.0%} of prompt from cache")

    def noted(self, note: str) -> None:
        """A request of the pass was answered; ``note`` says how it goes."""
        self._progress.update(self._task, advance=1, note=note)
        if self._plain and time.monotonic() - self._printed > _PRINTED_EVERY_S:
            self._printed = time.monotonic()
            self._progress.console.print(f"  {note}")

    def _begin(self, description: str, total: int | None) -> None:
        self._complete()
        if self._plain:
            self._progress.console.print(description)
        self._prompt = self._cached = 0
        self._printed = time.monotonic()
        self._task = self._progress.add_task(description, total=total, note="")

    def _complete(self) -> None:
        """End the present line; one whose requests nobody could count is complete."""
        self._progress.stop_task(self._task)
        if self._progress.tasks[-1].total is None:
            self._progress.update(self._task, total=1, completed=1)
