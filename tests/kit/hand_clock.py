"""A clock that the test moves."""

from __future__ import annotations


class Clock:
    """Tells ``now``, in seconds, until a test sets another time."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
