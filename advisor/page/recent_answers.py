"""Answers that many may ask for at once: what was true half a moment ago is told again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Final, TypeVar

FRESH_S: Final = 0.5
_KEPT: Final = 64  # answers
_T = TypeVar("_T")


class RecentAnswers:
    """Answers by question, each for ``FRESH_S``; from any thread.

    Two threads may work out the same answer at the same time; both are right.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._answers: OrderedDict[Hashable, tuple[float, Any]] = OrderedDict()

    def of(self, question: Hashable, answer: Callable[[], _T]) -> _T:
        """The answer of a moment ago, or else a new one."""
        known = self._answers.get(question)
        now = self._clock()
        if known is not None and now - known[0] < FRESH_S:
            kept: _T = known[1]
            return kept
        fresh = answer()
        self._answers[question] = now, fresh
        while len(self._answers) > _KEPT:
            self._answers.popitem(last=False)
        return fresh
