"""How soon another request may start although there is no room for it."""

from __future__ import annotations

import math
from typing import Final

_REST: Final = 0.1
"""Share of the time from such a start until the engine could take another, for which it is left
alone then. Chosen in the closed loop of the replay lab, on other sessions than those of the
figures."""
_CALM: Final = 0.06  # of the prompts computed again: so little is chance
_WASTE: Final = 5.0
"""How much longer that rest is for each part of the prompts beyond it that is computed again. Such
a start evicts what another session asks for soon, the sooner the shorter pauses are beside the
computing of prompts: then starting without room brings nobody forward. Chosen: more of it computes
less again, and finishes fewer turns."""
_LATEST: Final = 0.2  # weight of the newest prompt in the time that a block takes; chosen


class Pacing:
    """Spaces out requests that start without room: each evicts blocks that another request needs.

    It measures time by prompts, not by seconds: a machine that computes a prompt in half the time
    starts twice as many.
    """

    def __init__(self) -> None:
        self._began: float | None = None  # when the last one started; None: its prompt is computed
        self._from = -math.inf
        self._free = False
        self._blocks = 0  # of new context, that began then
        self._block_s: float | None = None

    @property
    def measures(self) -> bool:
        """Whether what started last is computed still."""
        return self._began is not None

    def begin(self, now: float, blocks: int) -> None:
        """Note that requests with so many blocks of new context start."""
        self._began, self._blocks = now, blocks

    def takes(self, blocks: int) -> float:
        """Seconds from start to end of so many blocks lately, turns between them included;
        infinite before any did."""
        return math.inf if self._block_s is None else blocks * self._block_s

    def looks(self, now: float, free: bool, again: float = 0.0) -> None:
        """Note at each step whether the engine could take another request.

        Args:
            free: No request is queued, and the prompt of the last one released has been computed.
            again: The share of the prompts that is computed again lately.
        """
        self._free = free
        if free and self._began is not None:
            took = now - self._began
            rest = _REST + _WASTE * max(0.0, again - _CALM)
            self._from, self._began = now + rest * took, None
            block_s = took / self._blocks
            before = block_s if self._block_s is None else self._block_s
            self._block_s = before + _LATEST * (block_s - before)

    def may_start(self, now: float, *, hurries: bool) -> bool:
        """Whether another may start; with ``hurries``, without a rest."""
        return self._free and (hurries or now >= self._from)
