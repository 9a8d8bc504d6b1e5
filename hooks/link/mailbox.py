"""``Mailbox``: holds the sidecar's latest advice, for an engine's threads to read at no cost."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Final

import numpy as np

from ...graph.types import Keys, as_keys
from ...graph.wire.advice import (
    AdmissionAdvice,
    AdmissionMessage,
    ContentKey,
    EvictionRanking,
    PrefetchMessage,
    RankingMessage,
    SendTips,
    StillValid,
)

# ``HeldRanking``: a ranking as the engine holds it, with what is looked up in it made ready.

NOBODY: Final = 0  # number of vLLM's null block, which never holds a key
_FIELDS: Final = tuple(each.name for each in fields(EvictionRanking))
Places = np.ndarray[tuple[int], np.dtype[np.int64]]
"""Numbers of blocks in an engine's pool; 0 is its null block, which holds no key."""
Finds = Callable[[Keys], Places]  # finds the blocks that hold keys


@dataclass(frozen=True, slots=True, eq=False)
class HeldRanking(EvictionRanking):
    """An ``EvictionRanking`` with lookup tables, made on the client's thread and not in a step."""

    worth: frozenset[int] = frozenset()  # keys of ``spill_first``
    places: dict[int, int] | None = None  # keys of ``protected``, each with its place
    # Blocks that held the keys of ``order`` when it arrived; None where nobody could tell.
    blocks: Places | None = None
    worth_blocks: Places | None = None  # the same of ``spill_first``

    @classmethod
    def of(
        cls, ranking: EvictionRanking, finds: Finds | None = None, copies: bool = True
    ) -> HeldRanking:
        """Make the lookup tables of ``ranking``.

        Args:
            finds: Finds the blocks that hold its keys; None: whoever applies it does.
            copies: Whether anybody asks which blocks are worth a copy.
        """
        values: dict[str, Any] = {name: getattr(ranking, name) for name in _FIELDS}
        if copies:
            values["worth"] = worth_of(ranking)
        if finds is not None:
            values["blocks"] = finds(ranking.order)
            if copies:
                values["worth_blocks"] = finds(ranking.spill_first)
        return cls(**values, places=places_of(ranking))


def blocks_of(ranking: EvictionRanking) -> Places | None:
    """Return the blocks that hold the keys of a ranking's order, if they were found before."""
    return ranking.blocks if isinstance(ranking, HeldRanking) else None


def worth_blocks_of(ranking: EvictionRanking, finds: Finds) -> Places:
    """Return the blocks that are worth a copy before they are evicted."""
    found = ranking.worth_blocks if isinstance(ranking, HeldRanking) else None
    return finds(ranking.spill_first) if found is None else found


def worth_of(ranking: EvictionRanking) -> frozenset[int]:
    """Return the keys of the blocks that are worth a copy before they are evicted."""
    if isinstance(ranking, HeldRanking):
        return ranking.worth
    return frozenset(ranking.spill_first.tolist())


def places_of(ranking: EvictionRanking) -> dict[int, int]:
    """Return the places of protected keys, the least precious first."""
    if isinstance(ranking, HeldRanking) and ranking.places is not None:
        return ranking.places
    return {key: place for place, key in enumerate(ranking.protected.tolist())}


Clock = Callable[[], float]
AnyOpinion = (
    RankingMessage | AdmissionMessage | StillValid | PrefetchMessage | SendTips | ContentKey
)

_TOLD: Final = (
    512  # sendings remembered: those of the 2 s that a ranking is valid, and more; chosen
)


class Mailbox:
    """Holds the latest of each kind of advice; old advice reads as none.

    One thread puts in, any thread reads: a reader reads one attribute and one clock.

    Args:
        max_stale_s: How long a ranking is acted on, in seconds.
        protect_stale_s: How long what it protects is kept, in seconds.
        clock: Monotonic seconds.

    Attributes:
        finds: Finds a ranking's blocks when it arrives; None: whoever applies it does.
        max_stale_s: As given.
        copies: Whether blocks that go are copied: else nobody asks which are worth it.
        ordered: Is told what to bring back when that arrives; must not wait, nor raise.
        content_key: The sidecar's, to digest what salted prompts say; None before it is known.
    """

    finds: Finds | None = None
    copies = True
    ordered: Callable[[Keys], None] | None = None

    def __init__(self, max_stale_s: float, protect_stale_s: float, clock: Clock) -> None:
        self._clock = clock
        self.max_stale_s = max_stale_s
        self._protect_stale = protect_stale_s
        self._ranking: EvictionRanking | None = None
        self._admission: AdmissionAdvice | None = None
        self._wanted: Keys | None = None
        self._tips_until = -math.inf
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
        """Return the latest ranking while its protection counts, even if its order has expired."""
        held = self._ranking
        if held is None or not self._clock() - held.ts <= self._protect_stale:
            return None
        return held

    def wanted(self) -> Keys | None:
        """Return the keys that the sidecar would prefetch, best first; as old as the ranking."""
        return self._wanted if self.ranking() is not None else None

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
        """Hold ``ranking`` with its own date."""
        self._ranking = ranking

    def hold_wanted(self, keys: Keys | None) -> None:
        """Hold suggestions of what to prefetch, best first."""
        self._wanted = keys

    def hold_admission(self, word: AdmissionAdvice | None) -> None:
        """Hold advice on room for new sessions with its own date."""
        self._admission = word

    def forget(self) -> None:
        """Forget all advice."""
        self._ranking = self._admission = None

    # The client's thread ------------------------------------------------------------------------

    def mark_sent(self, batches: int, until: float) -> None:
        """Note that events ``until`` this time are in the first ``batches`` that were sent."""
        if self._told and self._told[-1][0] == batches:
            self._told.pop()  # nothing was sent since: there was nothing to tell
        self._told.append((batches, until))

    def put(self, advice: AnyOpinion) -> None:
        """Hold ``advice``, dated by this clock.

        Raises:
            ValueError: Its keys are not whole 64-bit numbers.
        """
        match advice:
            case RankingMessage():
                ranking = advice.at(self._clock())
                dated = replace(ranking, known_of=self._known_of(ranking.heard))
                self._ranking = HeldRanking.of(dated, self.finds, self.copies)
            case AdmissionMessage():
                word = advice.at(self._clock())
                self._admission = replace(word, known_of=self._known_of(word.heard))
            case StillValid():
                self._redate(advice)
            case PrefetchMessage():
                self._wanted = order = as_keys(advice.order)
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
        told = (until for batches, until in self._told if batches <= heard)
        return max(told, default=-math.inf)
