"""What engines computed, and how much of it they had held before: the price of a small pool."""

from __future__ import annotations

from dataclasses import dataclass

from ..types import NEVER


@dataclass(slots=True)
class Prompts:
    """One engine's prompts so far, in blocks.

    Attributes:
        asked: Blocks of all prompts.
        again: Of these: computed, though they had been computed before.
        cleared: When the engine last came or emptied its cache: blocks lost by that are not
            counted.
    """

    asked: int = 0
    again: int = 0
    cleared: float = NEVER


class RegretBook:
    """Counts by residency column, since each engine's start."""

    def __init__(self) -> None:
        self._engines: dict[int, Prompts] = {}

    def note(self, engine: int, asked: int, again: int, last_seen: float) -> None:
        """Note that a prompt of ``asked`` blocks started, ``again`` of which are computed once
        more.

        Args:
            last_seen: When its session was last heard of before.
        """
        prompts = self._engines.setdefault(engine, Prompts())
        prompts.asked += asked
        if last_seen >= prompts.cleared:
            prompts.again += again

    def clear(self, engine: int, now: float) -> None:
        """Note that an engine came, or emptied its cache."""
        self._engines.setdefault(engine, Prompts()).cleared = now

    def of(self, engine: int) -> Prompts:
        """The counts of one engine; zero if it never reported."""
        return self._engines.get(engine) or Prompts()

    def forget(self, engine: int) -> None:
        """Forget an engine that is gone."""
        self._engines.pop(engine, None)
