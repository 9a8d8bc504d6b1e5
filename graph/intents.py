"""Intents: what callers want done with blocks outside requests, and how it is applied."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from .errors import GraphError
from .explain import blocks_of_memory, row_of
from .ranking.copies import COPIES
from .tables.tables import Tables
from .types import IS_PROTECTED, NEVER, NO_ROW, Authority, BlockFlag, BlockKey, Rows, Tier
from .wire.events import SessionSignal


class IntentKind(StrEnum):
    """What to do with the target's blocks."""

    PIN = "pin"  # lease them for some seconds, whatever the policy says
    RETAIN = "retain"  # set their importance, from 0 to 1, until a request states another
    DEMOTE = "demote"  # evict them first, until a request walks them again
    PREFETCH = "prefetch"  # load their copies back, since a request will need them
    SHARE = "share"  # other sessions will use them: the end of their session does not demote them


class Verdict(StrEnum):
    """The outcome of an intent."""

    ACCEPTED = "accepted"
    CLIPPED = "clipped"  # done in part: up to a bound, or for the known blocks
    DEFERRED = "deferred"  # will be done, as room or time allows
    REJECTED = "rejected"
    MISSING = "missing"  # no block or session that it names is known


@dataclass(frozen=True, slots=True)
class Target:
    """Which blocks an intent is about; exactly one of the first four fields must be given."""

    block: BlockKey | None = None  # a key: this block and all blocks before it in its chain
    session: str | None = None  # the blocks of the session's last turn
    # The blocks of all segments with this name, as in ``tool:search#3``; or one of them, as in
    # ``tool:search#3#0``.
    identity: str | None = None
    memory_id: str | None = None  # the blocks that refer to this memory
    # Only this tenant's blocks are affected; None: blocks without a tenant.
    tenant: str | None = None

    @property
    def named(self) -> int:
        """Number of the first four fields that are given."""
        given = (self.block, self.session, self.identity, self.memory_id)
        return sum(each is not None for each in given)


@dataclass(frozen=True, slots=True)
class Intent:
    kind: IntentKind
    target: Target
    # Seconds that a lease or a prefetch order lasts; None: as long as allowed.
    seconds: float | None = None
    importance: float = 1.0  # for ``RETAIN``: from 0 to 1


@dataclass(frozen=True, slots=True)
class IntentAnswer:
    verdict: Verdict
    reason: str
    blocks: int = 0  # blocks that it was applied to
    asked: int = 0  # blocks in its target
    seconds: float | None = None  # how long it lasts; None: no time limit


NOTHING: Final = IntentAnswer(Verdict.MISSING, "no block of that target is known for this tenant")


Mask = npt.NDArray[np.bool_]


POOL_SHARE: Final = 0.25
"""Share of a pool for all leases together, at most what protection may keep there. Chosen."""
TENANT_SHARE: Final = 0.125  # share of a pool, for one named tenant's leases; chosen
LONGEST_S: Final = 900.0  # longest lease or prefetch order, in seconds; chosen


def leasable(tables: Tables, rows: Rows, now: float, arriving: int | None = None) -> Rows:
    """Return the first of ``rows``, all of one tenant, that may be leased together.

    Blocks outside every pool are left out, unless they are about to enter the pool of the engine
    ``arriving``. In each pool concerned, other leases and the same tenant's leases count against
    the bounds.
    """
    blocks = tables.blocks
    if arriving is None:
        rows = rows[(blocks.tiers[:, rows] & int(Tier.HOT)).any(axis=0)]
    if not len(rows):
        return rows
    tenant = int(blocks.tenant[rows[0]])
    others = blocks.pinned_until[: blocks.size] > now  # the rows that have a lease
    others[rows] = False
    fitting = np.ones(len(rows), dtype=np.bool_)
    for engine, pool in tables.pool_blocks.items():
        here = (blocks.tiers[engine, rows] & int(Tier.HOT)) != 0
        here |= engine == arriving
        if not here.any():
            continue
        fitting &= ~here | (np.cumsum(here) <= _room(tables, engine, pool, others, tenant))
    leased: Rows = rows[fitting]
    return leased


def _room(tables: Tables, engine: int, pool: int, leased: Mask, tenant: int) -> int:
    blocks = tables.blocks
    here = leased & ((blocks.tiers[engine, : blocks.size] & int(Tier.HOT)) != 0)
    own = here & (blocks.tenant[: blocks.size] == tenant)
    most = min(POOL_SHARE, tables.kept_share(engine))  # leases have a price, too
    each = most if tables.protected_share is not None else most / 2  # as ``limited_by`` has it
    share = min(TENANT_SHARE, each) if tenant != NO_ROW else most
    in_all = int(most * pool) - int(np.count_nonzero(here))
    return min(in_all, int(share * pool) - int(np.count_nonzero(own)))


def target_rows(tables: Tables, target: Target) -> Rows:
    """Return the target's rows, int32 ``[n]``, those nearest to the start of their chains first.
    Rows of other tenants are left out. Raises GraphError.
    """
    if target.named != 1:
        raise GraphError(
            "a target names one of block, session, identity and memory_id; "
            f"{target.named} of them were named"
        )
    rows = _named(tables, target)
    blocks = tables.blocks
    tenant = NO_ROW if target.tenant is None else tables.tenants.find(target.tenant)
    rows = rows[blocks.tenant[rows] == tenant]
    ordered: Rows = rows[np.argsort(blocks.depth[rows], kind="stable")]
    return ordered


def _named(tables: Tables, target: Target) -> Rows:
    if target.block is not None:
        return chain_of(tables, row_of(tables, target.block))
    if target.session is not None:
        return _of_session(tables, target.session, target.tenant)
    if target.identity is not None:
        return _of_identity(tables, target.identity)
    assert target.memory_id is not None
    return blocks_of_memory(tables.edges, tables.memories.find(target.memory_id))


def chain_of(tables: Tables, row: int) -> Rows:
    """Return a block and all blocks before it in its chain, int32 ``[n]``."""
    parent, chain = tables.blocks.parent, []
    while row != NO_ROW:
        chain.append(row)
        row = int(parent[row])
    return np.array(chain, dtype=np.int32)


def _of_session(tables: Tables, name: str, tenant: str | None) -> Rows:
    number = NO_ROW if tenant is None else tables.tenants.find(tenant)
    row = tables.sessions.find(name, number)
    return chain_of(tables, NO_ROW if row == NO_ROW else int(tables.sessions.tip[row]))


def _of_identity(tables: Tables, name: str) -> Rows:
    """The blocks of a segment, or the single one that ``explain`` shows as ``name#0``."""
    number, chunk, blocks = tables.segment_names.find(name), "", tables.blocks
    if number == NO_ROW:
        name, _, chunk = name.rpartition("#")
        number = tables.segment_names.find(name)
    if number == NO_ROW or (chunk and not chunk.isdecimal()):
        return np.empty(0, dtype=np.int32)
    of_name = (blocks.identity[: blocks.size] == number) & blocks.alive[: blocks.size]
    if chunk:
        of_name &= blocks.chunk[: blocks.size] == int(chunk)
    return np.flatnonzero(of_name).astype(np.int32)


_IN_TIME = "a lease lasts {0:g} s at most"
_NO_SIGNAL = "it says neither that the session waits for a tool or a person, nor that it is over"


class IntentBook:
    """Applies intents to the graph's columns; the caller holds the graph's lock."""

    def __init__(
        self,
        tables: Tables,
        # applies a session signal; returns False for an unknown session
        signalled: Callable[[SessionSignal, float], bool],
        clock: Callable[[], float],  # monotonic seconds
    ) -> None:
        self._tables = tables
        self._signalled = signalled
        self._clock = clock

    def signal(self, signal: SessionSignal) -> IntentAnswer:
        """Apply a caller's statement about a session, made outside any request."""
        if signal.waiting_for_tool is None and not signal.ended:
            return IntentAnswer(Verdict.REJECTED, _NO_SIGNAL)
        if not self._signalled(signal, self._clock()):
            return IntentAnswer(Verdict.MISSING, "this tenant has no session of that name")
        return IntentAnswer(Verdict.ACCEPTED, "it counts, unless a request of the session runs")

    def apply(self, intent: Intent) -> IntentAnswer:
        """Apply an intent; a target that cannot be found is reported in the answer, not raised."""
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
        kept = leasable(self._tables, rows, now)
        if not len(kept):
            return IntentAnswer(
                Verdict.REJECTED, "other leases take all that may be leased", 0, len(rows)
            )
        blocks.for_writing("pinned_until")[kept] = now + seconds
        return _done(
            kept,
            rows,
            _lease_reason(len(kept), int(resident.sum()), len(rows), cut),
            seconds,
            clipped=bool(cut),
        )

    def _retain(self, rows: Rows, intent: Intent) -> IntentAnswer:
        worth = float(np.clip(intent.importance, 0.0, 1.0))
        self._tables.blocks.importance[rows] = worth
        return _done(rows, rows, f"their importance is {worth:g} until a request states one")

    def _demote(self, rows: Rows) -> IntentAnswer:
        """Demote blocks that only one session walked and that are not protected."""
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
        """For how many seconds the intent holds, and why that is less than asked for, if it is."""
        if intent.seconds is None:
            return LONGEST_S, ""
        seconds = max(0.0, intent.seconds)
        return (seconds, "") if seconds <= LONGEST_S else (LONGEST_S, _IN_TIME.format(LONGEST_S))


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
