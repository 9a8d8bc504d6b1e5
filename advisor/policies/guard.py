"""Does the policy do better than LRU would have? Measured on a sample, while it runs.

LRU of capacity C holds the C most recently used of all blocks, whatever happened before. The
graph remembers blocks after they left, so what LRU would hold now is one comparison with the
C-th latest use; no second cache is simulated.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from ...graph.blocks import Picked
from ...graph.tables import Tables
from ...graph.types import NO_ROW, Tier
from .hazard import Floats
from .waits import Sessions

Mask = npt.NDArray[np.bool_]

SAMPLE: Final = 16_384
"""Rows of the block table that are enough to look at."""

_HALF_LIFE_S: Final = 600.0  # of the evidence
_SURE: Final = 2.0  # standard deviations
_RETURNS: Final = 30.0  # sessions that must have come back
_YIELD_S: Final = 300.0


class Guard:
    """Compares, session by session as they return, what is there with what LRU would have."""

    def __init__(self) -> None:
        self._ours = np.empty(0)  # by session row: blocks here, as of the last look
        self._lru = np.empty(0)
        self._at: float | None = None
        self._yield_until = -np.inf
        self._forget()

    def yields(self, now: float) -> bool:
        """Whether LRU rules for the time being."""
        return now < self._yield_until

    def note(self, returned: Sessions) -> None:
        """These sessions came back since the last look: what did they find?"""
        seen = returned[returned < len(self._ours)]
        lost = self._lru[seen] - self._ours[seen]
        self._returns += np.count_nonzero(self._lru[seen] + self._ours[seen])
        self._lost += float(lost.sum())
        self._spread += float(np.square(lost).sum())

    def look(self, tables: Tables, engine: int, sample: Picked, on_chain: Mask, now: float) -> None:
        """Decide who rules, and see what each session would find if it came back now.

        Args:
            sample: Rows to look at; blocks that left are among them.
            on_chain: bool ``[len(sample)]``: what its session's next turn may match.
        """
        self._decide(now)
        blocks = tables.blocks
        here = (sample.of(blocks.tiers[engine]) & int(Tier.HOT)) != 0
        session = sample.of(blocks.session)
        counted = on_chain & (session != NO_ROW)
        recent = _most_recent(sample.last_used(), sample.of(blocks.alive), int(here.sum()))
        size = tables.sessions.size
        self._ours = np.bincount(session[counted & here], minlength=size).astype(float)
        self._lru = np.bincount(session[counted & recent], minlength=size).astype(float)

    def _decide(self, now: float) -> None:
        sure = self._lost > _SURE * self._spread**0.5
        if sure and self._returns >= _RETURNS and not self.yields(now):
            self._yield_until = now + _YIELD_S
            self._forget()
        fade = 1.0 if self._at is None else 0.5 ** ((now - self._at) / _HALF_LIFE_S)
        self._at = now
        self._returns *= fade
        self._lost *= fade
        self._spread *= fade

    def _forget(self) -> None:
        self._returns = self._lost = self._spread = 0.0


def _most_recent(used: Floats, alive: Mask, count: int) -> Mask:
    """Which ``count`` of the rows that are ``alive`` were used last."""
    known = used[alive]
    if count >= len(known):
        return alive
    bar = np.partition(known, len(known) - count - 1)[len(known) - count - 1]
    return np.asarray(alive & (used > bar))
