"""How long a bench's parts take, and what it still has time for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console


class Course:
    """Says how a bench goes on, and ends what it repeats where its time is over.

    Args:
        budget_s: Seconds for all of it.
        console: What people read.
        clock: Monotonic seconds.

    Attributes:
        took: Seconds of each part until now, by its name.
    """

    def __init__(
        self, budget_s: float, console: Console, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.took: dict[str, float] = {}
        self._budget_s = budget_s
        self._console = console
        self._clock = clock
        self._began = clock()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Measure and tell how long a part takes; one that fails counts too."""
        began = self._clock()
        try:
            yield
        finally:
            now = self._clock()
            self.took[name] = self.took.get(name, 0.0) + now - began
            spent, budget = (each / 60 for each in (now - self._began, self._budget_s))
            self.say(f"{name}: {now - began:.0f} s; {spent:.1f} of {budget:.0f} minutes are over")

    def has_time_for(self, seconds: float, share: float = 1.0) -> bool:
        """Whether what takes so long ends within a share of the budget, from the start on."""
        return self._clock() - self._began + seconds <= share * self._budget_s

    def say(self, line: str) -> None:
        """Tell people something."""
        self._console.print(line, soft_wrap=True)
