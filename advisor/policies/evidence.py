"""``PolicySelector``: chooses whether a policy or LRU ranks a pool, by how many more blocks one of
them finds, request by request. Until an engine's own evidence is conclusive, that of all engines,
which serve the same traffic, may let the policy start there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

# All chosen, based on generated and recorded traffic of several kinds.
_MEMORY: Final = 40.0  # pools' worth of walked blocks over which evidence fades by half
# Standard deviations by which the policy must be ahead. With one whole deviation it starts so late
# that it loses a tenth of its gain over LRU in the first 800 requests of recorded agents.
_SURE: Final = 0.5
# Likewise for LRU to take over: with half a deviation, chance alone replaces a policy that finds
# more in the long run.
_SURE_OF_LRU: Final = 1.0
_AHEAD: Final = 0.02  # and share of a pool's blocks by which it must be ahead


@dataclass(slots=True)
class Evidence:
    """Blocks that a policy found beyond LRU: their sum over requests, negative if LRU found more,
    the sum of their squares, and the largest of them.
    """

    ahead: float = 0.0
    spread: float = 0.0
    most: float = 0.0

    def note(self, difference: float, fade: float) -> None:
        """Add a request in which the policy found ``difference`` more blocks than LRU; earlier
        evidence is multiplied by ``fade``, in [0, 1].
        """
        self.ahead = self.ahead * fade + difference
        self.spread = self.spread * fade + difference * difference
        self.most = max(self.most * fade, difference)

    def is_sure(self, least: float) -> bool:
        """Return whether one of them is better, by ``least`` blocks and beyond chance; the policy
        must be ahead without the request that helped it most, too: one alone is always more than
        half a standard deviation.
        """
        sure = _SURE if self.ahead > 0 else _SURE_OF_LRU
        is_beyond_chance = abs(self.ahead) > max(sure * math.sqrt(self.spread), least)
        return is_beyond_chance and (self.ahead < 0 or self.ahead > self.most)


@dataclass(slots=True)
class PolicySelector:
    """Chooses whether a policy or LRU ranks a pool, by how many blocks each would have found there;
    old evidence fades.
    """

    capacity: int  # blocks of the pool
    trusted: bool = False  # whether the policy ranks
    changes: int = 0  # how often one replaced the other
    decided: bool = False  # whether that ever happened, even before the pool was emptied
    since: Evidence = field(default_factory=Evidence)  # the evidence since then
    ever: Evidence = field(default_factory=Evidence)  # all evidence, under either order
    asked: float = 0.0  # blocks requested in that evidence; fades likewise

    @property
    def points_ahead(self) -> float:
        """Return by how many percentage points the policy's hit rate is ahead of LRU's lately."""
        return 100.0 * self.ever.ahead / self.asked if self.asked else 0.0

    def note(self, difference: int, walked: int) -> None:
        """Note a request of ``walked`` blocks in which the policy found ``difference`` more than
        LRU.
        """
        fade = fading(walked, self.capacity)
        self.since.note(difference, fade)
        self.ever.note(difference, fade)
        self.asked = self.asked * fade + walked

    def is_due_for_change(self) -> bool:
        """Return whether the other order is better here, beyond chance."""
        # Each change that was taken back makes the next one harder: two equals do not take turns.
        least = least_lead(self.capacity) * (1 + self.changes // 2)
        return self.since.is_sure(least) and (self.since.ahead > 0) != self.trusted

    def may_begin(self, fleet: Iterable[PolicySelector]) -> bool:
        """Return whether the policy is better on all engines together, beyond chance, and nothing
        was decided here yet.

        An engine whose own evidence favours LRU does not follow the others. If the policy finds
        less here, the price is paid once, until the evidence is conclusive.
        """
        least = least_lead(self.capacity)
        is_for_lru = self.ever.is_sure(least) and self.ever.ahead < 0
        if self.trusted or self.decided or is_for_lru:
            return False
        together, blocks = _together(fleet)
        return together.ahead > 0 and together.is_sure(least_lead(blocks))

    def anew(self, capacity: int) -> PolicySelector:
        """Return the same choice without evidence, for a pool that was emptied or resized."""
        return PolicySelector(capacity, self.trusted, decided=self.decided)

    def change_hands(self) -> None:
        self.trusted = not self.trusted
        self.changes += 1
        self.decided = True
        self.since = Evidence()


def least_lead(capacity: int) -> float:
    """Return by how many blocks an order must be ahead in a pool of ``capacity`` blocks."""
    return _AHEAD * capacity


def fading(walked: int, capacity: int) -> float:
    """Return the factor for earlier evidence after ``walked`` blocks, in a pool of ``capacity``."""
    return float(0.5 ** (walked / (_MEMORY * capacity)))


def _together(fleet: Iterable[PolicySelector]) -> tuple[Evidence, int]:
    """Pool the evidence of several engines, and their blocks."""
    ahead = spread = most = 0.0
    blocks = 0
    for each in fleet:  # many, and asked for by each of them
        ever = each.ever
        ahead, spread, blocks = ahead + ever.ahead, spread + ever.spread, blocks + each.capacity
        most = max(most, ever.most)
    return Evidence(ahead, spread, most), blocks
