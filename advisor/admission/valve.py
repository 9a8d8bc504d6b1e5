"""How much of a pool live contexts may take: found by feedback from what is computed twice."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from .demand import Demand

# All chosen in the closed loop of the replay lab, on other sessions than those of the figures.
_MEMORY: Final = 2.0  # pools' worth of asked blocks over which regret fades by half
_CLOSES: Final = 0.35  # of the asked blocks, computed again
_HIGH: Final = 0.12  # above this the limit falls …
_CALM: Final = 0.06  # … and below this it rises, and what was closed may open
_FALL: Final = 0.15  # of the limit, for a pool's worth of asked blocks
_RISE: Final = 0.05  # of the pool, for as much
_LEAST, _MOST = 0.5, 1.1  # bounds of the limit, in pools
_CALM_POOLS: Final = 3.0  # asked so long with room to spare: opens
_USELESS: Final = 0.8  # of the asked blocks: if so many are computed again although it is closed …
_TRIAL_POOLS: Final = 4.0  # … and so much was asked while requests were held, it opens …
_BARRED_POOLS: Final = 32.0  # … until so much more was asked: twice as much after each such time
_MOST_FAILED: Final = 6  # such times that are counted


@dataclass(slots=True)
class Valve:
    """The limit of one engine whose pool has ``pool`` blocks.

    Attributes:
        limit: Blocks of the pool that live contexts may take; None: open, as many as come.
    """

    pool: int
    limit: float | None = None
    _asked: float = 0.0  # blocks; fades
    _again: float = 0.0  # of these, computed again
    _roomy: float = 0.0  # blocks asked since room was last short
    _closed: float = 0.0  # blocks asked while it was closed and requests were held
    _barred: float = 0.0  # blocks that must be asked before it may close again
    _failed: int = 0  # times that it opened since it saved nothing
    _seen: tuple[int, int] = (0, 0)

    @property
    def regret(self) -> float:
        """The share of what was asked lately that was computed again."""
        return self._again / max(self._asked, self.pool)

    @property
    def barred_pools(self) -> int:
        """Pools' worth of blocks that must be asked before it may close again; 0: it may now."""
        return math.ceil(max(0.0, self._barred) / self.pool)

    def update(self, asked: int, again: int, demand: Demand, *, holds: bool = True) -> None:
        """Close, open or move the limit.

        Args:
            asked: Blocks of all prompts so far.
            again: Of these: computed, though they had been before.
            demand: What live sessions want of the pool now.
            holds: Whether the engine holds requests: while it does not, a limit is not on trial.
        """
        new = self._note(asked, again)
        if self.limit is None:
            self._barred -= new
            if self.regret > _CLOSES and self._barred <= 0:
                self.limit, self._roomy = float(min(demand.blocks, self.pool)), 0.0
                self._closed = 0.0
            return
        self._closed += new if holds else 0
        if self._closed > _TRIAL_POOLS * self.pool and self.regret > _USELESS:
            # Contexts are lost whoever waits: pauses are too long, or sessions too many.
            self.limit, self._barred = None, _BARRED_POOLS * self.pool * 2.0**self._failed
            self._failed = min(self._failed + 1, _MOST_FAILED)
            return
        self.limit = self._moved(self.limit, new / self.pool)
        roomy = self.limit - demand.blocks > demand.usual and self.regret < _CALM
        self._roomy = self._roomy + new if roomy else 0.0
        if self._roomy > _CALM_POOLS * self.pool:
            self.limit = None

    def _note(self, asked: int, again: int) -> int:
        """Blocks asked since the last time; older ones fade."""
        if asked < self._seen[0]:
            self._seen = 0, 0  # counted anew: another engine in the place of one that is gone
        new, lost = asked - self._seen[0], again - self._seen[1]
        self._seen = asked, again
        fade = 0.5 ** (new / (_MEMORY * self.pool))
        self._asked, self._again = self._asked * fade + new, self._again * fade + lost
        return new

    def _moved(self, limit: float, pools: float) -> float:
        if self.regret > _HIGH:
            limit *= (1.0 - _FALL) ** pools
        elif self.regret < _CALM:
            limit += _RISE * pools * self.pool
        return min(max(limit, _LEAST * self.pool), _MOST * self.pool)
