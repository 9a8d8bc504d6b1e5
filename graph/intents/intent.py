"""An intent, its target, and its answer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from ..types import BlockKey


class IntentKind(StrEnum):
    """What is wanted of blocks."""

    PIN = "pin"
    """Keep them for some seconds, whatever a policy says: a lease."""
    RETAIN = "retain"
    """Value them so much, from 0 to 1, until a request says otherwise."""
    DEMOTE = "demote"
    """Let them go first, until a request walks them again."""
    PREFETCH = "prefetch"
    """Bring their copies back: they will be asked for."""
    SHARE = "share"
    """Other sessions will use them: the end of theirs does not end them."""


class Verdict(StrEnum):
    """What became of an intent."""

    ACCEPTED = "accepted"
    CLIPPED = "clipped"  # to a bound, or to the blocks that there are
    DEFERRED = "deferred"  # it will be done, as room or time allows
    REJECTED = "rejected"
    MISSING = "missing"  # there is nothing that it could be done to


@dataclass(frozen=True, slots=True)
class Target:
    """Which blocks are meant: exactly one of these names them.

    Attributes:
        block: A key: the block and all that stand before it in its chain.
        session: All that the session's last turn walked.
        identity: Those of the segments of this name, as in ``tool:search#3``; or one of its blocks,
            as in ``tool:search#3#0``.
        memory_id: Those that refer to this memory.
        tenant: Whose; blocks of others are not touched. None: those of no tenant.
    """

    block: BlockKey | None = None
    session: str | None = None
    identity: str | None = None
    memory_id: str | None = None
    tenant: str | None = None

    @property
    def named(self) -> int:
        """How many of the four are given; it has to be one."""
        given = (self.block, self.session, self.identity, self.memory_id)
        return sum(each is not None for each in given)


@dataclass(frozen=True, slots=True)
class Intent:
    """What is wanted.

    Attributes:
        seconds: How long a lease or an order to prefetch lasts; None: as long as it may.
        importance: Of ``RETAIN``.
    """

    kind: IntentKind
    target: Target
    seconds: float | None = None
    importance: float = 1.0


@dataclass(frozen=True, slots=True)
class IntentAnswer:
    """What became of an intent.

    Attributes:
        blocks: To how many it was done.
        asked: How many its target has.
        seconds: How long it holds; None: there is no such time.
    """

    verdict: Verdict
    reason: str
    blocks: int = 0
    asked: int = 0
    seconds: float | None = None


NOTHING: Final = IntentAnswer(Verdict.MISSING, "no block of that target is known for this tenant")
