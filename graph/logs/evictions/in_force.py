"""``InForce``: the ranking that an engine evicts by, for the records of what it evicts."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from ...types import IS_PROTECTED, Keys, SourceLayer, layer_mask
from .eviction_log import UNPLACED, Places
from .score_terms import NO_TERMS, TermsThen

if TYPE_CHECKING:
    from ...messages.advice import EvictionRanking

Mask = npt.NDArray[np.bool_]
_RANKINGS: Final = 4_096  # times that are remembered: half an hour of them; chosen
_TERMS_EVERY_S: Final = 1.0  # they cost a third of a ranking; chosen


class _Order:
    """Keys in an order; sorted at the first question."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._sorted: Keys | None = None
        self._at = np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._keys)

    def places(self, keys: Keys) -> Places:
        """uint16: how many are before each; ``UNPLACED`` if it is not there."""
        if self._sorted is None:
            self._at = np.argsort(self._keys)
            self._sorted = self._keys[self._at]
        found = np.full(len(keys), UNPLACED, dtype=np.uint16)
        if len(self._sorted):
            at = np.minimum(np.searchsorted(self._sorted, keys), len(self._sorted) - 1)
            there = self._sorted[at] == keys
            found[there] = np.minimum(self._at[at[there]], UNPLACED - 1)
        return found


class InForce:
    """An engine's last ranking, when the ones before it were made, and terms of a recent one.

    Attributes:
        layers: bool ``[256]``: the source layers that it protects.
    """

    def __init__(self) -> None:
        self._made: deque[tuple[float, int]] = deque(maxlen=_RANKINGS)  # when, and its epoch
        self._order = self._termed = _Order(np.empty(0, dtype=np.uint64))
        self._kept: Keys = np.empty(0, dtype=np.uint64)
        self._terms = NO_TERMS
        self._termed_at = -np.inf
        self.layers = IS_PROTECTED

    @property
    def is_lrus(self) -> bool:
        """Whether the engine keeps its own order: no ranking was made, or it names no block."""
        return not len(self._order)

    def wants_terms(self, now: float) -> bool:
        """Whether the terms that are known are too old."""
        return now - self._termed_at >= _TERMS_EVERY_S

    def adopt(
        self, ranking: EvictionRanking, layers: Iterable[SourceLayer], terms: TermsThen | None
    ) -> None:
        """Take a new ranking.

        Args:
            terms: Of the blocks that it lets go first; None: those of an earlier one still hold.
        """
        self._order, self._kept = _Order(ranking.order), ranking.protected
        self.layers = layer_mask(layers)
        self._made.append((ranking.ts, ranking.epoch))
        if terms is not None:
            self._termed, self._terms, self._termed_at = self._order, terms, ranking.ts

    def gave_up(self, keys: Keys, place: Places, used: npt.NDArray[np.float64]) -> Mask:
        """Which of these protected blocks the ranking did not keep back, though it knew them: their
        layers are protected up to a share.

        Args:
            used: When each was used last.
        """
        made = self._made[-1][0] if self._made else -np.inf
        known: Mask = (place != UNPLACED) | (used <= made)
        return known & ~np.isin(keys, self._kept)

    def places(self, keys: Keys) -> Places:
        """uint16: how many blocks are before each; ``UNPLACED`` if it is not named."""
        return self._order.places(keys)

    def terms(self, keys: Keys, place: Places) -> TermsThen:
        """The terms of those of these blocks that the ranking names, as they were last worked out;
        NaN for the others.

        Args:
            place: What ``places`` says of them.
        """
        if self._terms.names and self._termed is not self._order:
            earlier = self._termed.places(keys)
            place = np.where(place == UNPLACED, place, earlier)
        return self._terms.at(place)

    def at(self, then: float) -> int | None:
        """The epoch of the ranking that was in force then; None without one."""
        place = bisect_right(self._made, then, key=lambda each: each[0])
        return self._made[place - 1][1] if place else None
