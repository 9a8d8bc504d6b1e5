"""Does what intents want, as far as bounds allow, and answers each."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..errors import GraphError
from ..messages.events import SessionSignal
from ..ranking.copy_worth import COPIES
from ..tables.tables import Tables
from ..types import IS_PROTECTED, NEVER, Authority, BlockFlag, Rows, Tier
from .intent import NOTHING, Intent, IntentAnswer, IntentKind, Verdict
from .leases import LeaseBounds, leasable
from .targets import target_rows

_IN_TIME = "a lease lasts {0:g} s at most"
_NO_SIGNAL = "it says neither that the session waits for a tool or a person, nor that it is over"


class IntentBook:
    """Applies intents to the graph's columns; the caller holds the graph's lock.

    Args:
        signalled: Applies what somebody says of a session; False if it is unknown.
        clock: Monotonic seconds.

    Attributes:
        bounds: Of leases; assign others to change them.
    """

    def __init__(
        self,
        tables: Tables,
        signalled: Callable[[SessionSignal, float], bool],
        clock: Callable[[], float],
    ) -> None:
        self._tables = tables
        self._signalled = signalled
        self._clock = clock
        self.bounds = LeaseBounds()

    def signal(self, said: SessionSignal) -> IntentAnswer:
        """Take what somebody says of a session outside of any request."""
        if said.waiting_for_tool is None and not said.ended:
            return IntentAnswer(Verdict.REJECTED, _NO_SIGNAL)
        if not self._signalled(said, self._clock()):
            return IntentAnswer(Verdict.MISSING, "this tenant has no session of that name")
        return IntentAnswer(Verdict.ACCEPTED, "it counts, unless a request of the session runs")

    def apply(self, intent: Intent) -> IntentAnswer:
        """Do what is wanted, and say what came of it; never raises for what it names."""
        now = self._clock()
        try:
            rows = target_rows(self._tables, intent.target)
        except GraphError as error:
            known = intent.target.named == 1
            return IntentAnswer(Verdict.MISSING if known else Verdict.REJECTED, str(error))
        if not len(rows):
            return NOTHING
        match intent.kind:
            case IntentKind.PIN:
                return self._pin(rows, intent, now)
            case IntentKind.RETAIN:
                return self._retain(rows, intent)
            case IntentKind.DEMOTE:
                return self._demote(rows)
            case IntentKind.PREFETCH:
                return self._prefetch(rows, intent, now)
            case IntentKind.SHARE:
                self._tables.blocks.flag(rows, BlockFlag.SHARED)
                return _done(rows, rows, "their session's end does not end them")

    def _pin(self, rows: Rows, intent: Intent, now: float) -> IntentAnswer:
        blocks, (seconds, cut) = self._tables.blocks, self._lasting(intent)
        resident = (blocks.tiers[:, rows] & int(Tier.HOT)).any(axis=0)
        if not resident.any():
            return IntentAnswer(
                Verdict.MISSING, "none of its blocks is in a pool; prefetch it first", 0, len(rows)
            )
        kept = leasable(self._tables, self.bounds, rows, now)
        if not len(kept):
            return IntentAnswer(
                Verdict.REJECTED, "other leases take all that may be leased", 0, len(rows)
            )
        blocks.for_writing("pinned_until")[kept] = now + seconds
        return _done(kept, rows, _lease_reason(len(kept), int(resident.sum()), len(rows), cut),
                     seconds, clipped=bool(cut))  # fmt: skip

    def _retain(self, rows: Rows, intent: Intent) -> IntentAnswer:
        worth = float(np.clip(intent.importance, 0.0, 1.0))
        self._tables.blocks.importance[rows] = worth
        return _done(rows, rows, f"their importance is {worth:g} until a request states one")

    def _demote(self, rows: Rows) -> IntentAnswer:
        """Only blocks that one session alone walked, and that nothing protects, go for a word."""
        blocks = self._tables.blocks
        alone = ~blocks.flagged(rows, BlockFlag.SHARED)
        protected = IS_PROTECTED[blocks.layer[rows]]
        alone &= ~(protected & (blocks.stated[rows] != int(Authority.INFERRED)))
        freed = rows[alone]
        if not len(freed):
            return IntentAnswer(
                Verdict.REJECTED, "all of them are shared or protected", 0, len(rows)
            )
        blocks.flag(freed, BlockFlag.SUPERSEDED)
        blocks.for_writing("pinned_until")[freed] = NEVER
        reason = "they go first until a request walks them"
        return _done(freed, rows, reason + ("" if alone.all() else "; shared and protected stay"))

    def _prefetch(self, rows: Rows, intent: Intent, now: float) -> IntentAnswer:
        blocks, (seconds, cut) = self._tables.blocks, self._lasting(intent)
        tiers = blocks.tiers[:, rows]
        there = ((tiers & int(Tier.HOT)) != 0).any(axis=0)
        copied = ((tiers & COPIES) != 0).any(axis=0)
        if there.all():
            return _done(rows, rows, "all of them are in a pool already")
        wanted = rows[copied & ~there]
        if not len(wanted):
            return IntentAnswer(
                Verdict.MISSING, "no tier has a copy of what is not in a pool", 0, len(rows)
            )
        blocks.for_writing("wanted_until")[wanted] = now + seconds
        reason = f"they are brought back as their engine has room, within {seconds:g} s"
        return IntentAnswer(
            Verdict.DEFERRED, f"{reason}; {cut}" if cut else reason, len(wanted), len(rows), seconds
        )

    def _lasting(self, intent: Intent) -> tuple[float, str]:
        """How many seconds it holds, and why not longer, if it is less than was asked for."""
        longest = self.bounds.longest_s
        if intent.seconds is None:
            return longest, ""
        seconds = max(0.0, intent.seconds)
        return (seconds, "") if seconds <= longest else (longest, _IN_TIME.format(longest))


def _lease_reason(kept: int, resident: int, asked: int, cut: str) -> str:
    reasons = [cut] if cut else []
    if kept < resident:
        reasons.append("leases are bounded shares of a pool; the start of the chain is kept")
    if resident < asked:
        reasons.append(f"{asked - resident} are in no pool")
    return "; ".join(reasons) or "they stay, but for what is protected"


def _done(
    done: Rows, asked: Rows, reason: str, seconds: float | None = None, clipped: bool = False
) -> IntentAnswer:
    verdict = Verdict.CLIPPED if clipped or len(done) < len(asked) else Verdict.ACCEPTED
    return IntentAnswer(verdict, reason, len(done), len(asked), seconds)
