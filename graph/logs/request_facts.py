"""What the log knows of a request: who it is, what it asked for, its miss, how it was held."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from .reasons import Detail, Reason


@dataclass(frozen=True, slots=True)
class Miss:
    """The first block that a prompt did not find, and why.

    Attributes:
        index: Which block of the prompt.
        key: As the engine calls it; 0: it has none.
        detail: A ``Rule`` for EVICTED, a ``Cause`` for COPY_LOST, a group's place for OTHER_GROUP,
            else a ``Detail``.
        eviction: Its record's id in the engine's log; -1: none.
        left: When it left the pool, in the clock's seconds; NaN: it did not.
        session: The other session's name and tenant.
        engine: That has it.
        short: How many blocks had left since it did, it among them, or since another did that is
            computed again with it: by about so many the pool was too small to keep them all. 0:
            that is not known.
        same: Tokens of it that another prompt has there too, where it differs; 0: not known.
    """

    index: int
    key: int
    reason: Reason
    detail: int = Detail.NONE
    eviction: int = -1
    left: float = float("nan")
    session: tuple[str | None, str | None] = (None, None)
    engine: str | None = None
    short: int = 0
    same: int = 0

    def keeping_all(self, short: int) -> Miss:
        """The same miss; if it has a ``short``, that is at least this."""
        return replace(self, short=max(self.short, short)) if self.short else self


class Hold(NamedTuple):
    """How long a request was held until there was room for its context.

    Attributes:
        seconds: Of those that it waited.
        reason: Why it waited no longer: one of ``HOLD_ENDS``.
        fitting: Sessions that fit, by the advice because of which it waited; 0: not known.
        live: Sessions that were live, by the same.
    """

    seconds: float
    reason: str
    fitting: int
    live: int


@dataclass(frozen=True, slots=True)
class PromptBlocks:
    """What a request asked for, and what was found; in blocks, except ``tokens``.

    Attributes:
        again: Of what it computed: blocks that were once in this pool.
        waited_s: Before it was scheduled.
        hold: The part of it that it was held; None: it was not.
    """

    tokens: int
    size: int
    asked: int
    pool: int
    loaded: int
    prefetched: int
    spliced: int
    again: int
    waited_s: float = 0.0
    hold: Hold | None = None


class Other(NamedTuple):
    """The session and the engine that a miss is about; None: it is about none."""

    session: str | None = None
    tenant: str | None = None
    engine: str | None = None


NOBODY: Final = Other()


@dataclass(slots=True)
class RequestNames:
    """Who a request is; ``finished`` is why it ended."""

    request: str
    engine: str
    session: str | None
    tenant: str | None
    other: Other = NOBODY
    finished: str | None = None
