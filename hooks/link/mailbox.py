"""``Mailbox``: holds the sidecar's latest advice, for an engine's threads to read at no cost."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import numpy as np

from ...graph.types import Keys, as_keys
from ...graph.wire.advice import (
    AdmissionAdvice,
    BlockIds,
    ContentKey,
    EvictionRanking,
    PrefetchMessage,
    SendTips,
    StillValid,
)

NOBODY: Final = 0  # number of vLLM's null block, which never holds a key
Finds = Callable[[Keys], BlockIds]  # maps keys to the blocks that hold them


def looked_up(
    ranking: EvictionRanking, finds: Finds | None = None, copies: bool = True
) -> EvictionRanking:
    """Return ``ranking`` with the look-ups that an engine needs already made, outside of its steps:
    the blocks found by ``finds`` for its keys, and the blocks worth a copy if ``copies``.
    """
    return replace(
        ranking,
        order_blocks=None if finds is None else finds(ranking.order),
        spill_blocks=finds(ranking.spill_first) if finds is not None and copies else None,
        spill_keys=np.sort(ranking.spill_first) if copies else None,
        protected_places=places_of(ranking.protected),
    )


def places_of(keys: Keys) -> dict[int, int]:
    return {key: place for place, key in enumerate(keys.tolist())}


Clock = Callable[[], float]
AnyOpinion = (
    EvictionRanking | AdmissionAdvice | StillValid | PrefetchMessage | SendTips | ContentKey
)

_TOLD: Final = (
    512  # messages remembered: more than are sent in the 2 s that a ranking is valid; chosen
)


class Mailbox:
    """Holds the latest of each kind of advice; outdated advice reads as None. One thread writes,
    any thread reads. A read costs one attribute and one clock.
    """

    # finds a ranking's blocks when it arrives; None: whoever applies the ranking finds them
    finds: Finds | None = None
    copies = True
    # called with the keys to load back when they arrive; must neither wait nor raise
    ordered: Callable[[Keys], None] | None = None

    def __init__(self, max_stale_s: float, protect_stale_s: float, clock: Clock) -> None:
        self._clock = clock
        self.max_stale_s = max_stale_s
        self._protect_stale = protect_stale_s
        self._ranking: EvictionRanking | None = None
        self._admission: AdmissionAdvice | None = None
        # what the sidecar suggested last to bring back; see `wanted`
        self.order: Keys | None = None
        self._tips_until = -math.inf
        # the sidecar's, to digest what salted prompts say; None before it is known
        self.content_key: bytes | None = None
        self._told: deque[tuple[int, float]] = deque(maxlen=_TOLD)  # see ``mark_sent``

    def ranking(self) -> EvictionRanking | None:
        """Return the latest ranking, or None if there is none fresh enough to act on."""
        held = self._ranking  # the compiled core reads this attribute too
        # `not <=` rather than `>`, so that a time that is not a number reads as stale.
        if held is None or not self._clock() - held.ts <= self.max_stale_s:
            return None
        return held

    def remembered(self) -> EvictionRanking | None:
        """Return the latest ranking while its protection holds, even if its order expired."""
        held = self._ranking
        if held is None or not self._clock() - held.ts <= self._protect_stale:
            return None
        return held

    def wanted(self) -> Keys | None:
        """Return the keys to prefetch, best first; None without fresh advice."""
        return self.order if self.ranking() is not None else None

    def admission(self) -> AdmissionAdvice | None:
        """Return the latest advice on room for new sessions, or None if none is fresh enough."""
        held = self._admission  # and this one
        if held is None or not self._clock() - held.ts <= self.max_stale_s:
            return None
        return held

    def wants_tips(self) -> bool:
        """Whether the sidecar asks that requests be reported by the last key of their chain."""
        return self._clock() < self._tips_until

    def hold_ranking(self, ranking: EvictionRanking | None) -> None:
        self._ranking = ranking

    def hold_wanted(self, keys: Keys | None) -> None:
        self.order = keys

    def hold_admission(self, word: AdmissionAdvice | None) -> None:
        self._admission = word

    def forget(self) -> None:
        self._ranking = self._admission = None

    # The client's thread ------------------------------------------------------------------------

    def mark_sent(self, batches: int, until: float) -> None:
        """Note that the first ``batches`` sent contain all events up to the time ``until``."""
        if self._told and self._told[-1][0] == batches:
            self._told.pop()  # nothing was sent since: there was nothing to tell
        self._told.append((batches, until))

    def put(self, advice: AnyOpinion) -> None:
        """Store ``advice``, converting its time to this clock; raises ValueError."""
        match advice:
            case EvictionRanking():
                known = replace(advice, known_of=self._known_of(advice.heard))
                self._ranking = looked_up(known, self.finds, self.copies)
            case AdmissionAdvice():
                self._admission = replace(advice, known_of=self._known_of(advice.heard))
            case StillValid():
                self._redate(advice)
            case PrefetchMessage():
                self.order = order = as_keys(advice.order)
                if self.ordered is not None:
                    self.ordered(order)
            case SendTips():
                self._tips_until = self._clock() + advice.seconds
            case ContentKey():
                self.content_key = advice.key

    def _redate(self, valid: StillValid) -> None:
        held = self._ranking
        if held is not None and held.epoch == valid.epoch:
            ts = self._clock() - valid.age_s
            known_of = max(held.known_of, self._known_of(valid.heard))
            self._ranking = replace(held, ts=ts, known_of=known_of)

    def _known_of(self, heard: int) -> float:
        """Return until when advice knows events, if it knows the first ``heard`` batches."""
        told = (until for batches, until in reversed(self._told) if batches <= heard)
        return next(told, -math.inf)  # both numbers only grow
