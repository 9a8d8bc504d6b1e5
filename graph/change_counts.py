"""``ChangeCounts``: whether what a ranking was made from has changed since."""

from __future__ import annotations

from collections import Counter


class ChangeCounts:
    """One number per engine, which rises with whatever may change the ranking of its blocks.

    Attributes:
        total: Rises with every change.
    """

    def __init__(self) -> None:
        self.total = 0
        self._all = 0
        self._own: Counter[str] = Counter()

    def of(self, engine: str) -> int:
        """The engine's number."""
        return self._all + self._own[engine]

    def changed(self, engine: str) -> None:
        """Note that events of this engine were applied.

        What they tell about blocks that other engines hold too is left to these engines' own
        events: an engine without any loses no block.
        """
        self._own[engine] += 1
        self.total += 1

    def all_changed(self) -> None:
        """Note that all rankings are out of date."""
        self._all += 1
        self.total += 1

    def forget(self, engine: str) -> None:
        """Forget an engine that is gone; no number falls by that."""
        self._all += self._own.pop(engine, 0) + 1
        self.total += 1
