"""What engines computed, and what of that they had held before: the price of a pool too small."""

from __future__ import annotations

from dataclasses import dataclass

from ..types import NEVER


@dataclass(slots=True)
class Prompts:
    """One engine's prompts so far, in blocks.

    Attributes:
        asked: Blocks of all prompts.
        again: Of these: computed, though they had been computed before.
        cleared: When the engine last came or emptied its cache: what was lost by that is nobody's
            regret.
    """

    asked: int = 0
    again: int = 0
    cleared: float = NEVER


class RegretBook:
    """Counts by residency column, since each engine's start."""

    def __init__(self) -> None:
        self._engines: dict[int, Prompts] = {}

    def note(self, engine: int, asked: int, again: int, last_seen: float) -> None:
        """A prompt of ``asked`` blocks started, of which ``again`` are computed once more.

        Args:
            last_seen: When its session was heard of before.
        """
        prompts = self._engines.setdefault(engine, Prompts())
        prompts.asked += asked
        if last_seen >= prompts.cleared:
            prompts.again += again

    def clear(self, engine: int, now: float) -> None:
        """An engine came, or emptied its cache."""
        self._engines.setdefault(engine, Prompts()).cleared = now

    def of(self, engine: int) -> Prompts:
        """The counts of one engine; zero for one that never spoke."""
        return self._engines.get(engine) or Prompts()

    def forget(self, engine: int) -> None:
        """An engine is gone."""
        self._engines.pop(engine, None)
