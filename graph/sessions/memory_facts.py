"""What is known of one memory, beside the blocks that refer to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

_SESSIONS: Final = 64  # that are remembered of a memory, the last ones; chosen


@dataclass(slots=True)
class MemoryFacts:
    """Properties of a MEMORY node.

    Attributes:
        first_seen, last_recalled: Monotonic seconds.
        recalls: How often it was named by a session that had not, or at other blocks.
        sessions: Rows of the last sessions that named it, in their order; rows are reused.
    """

    first_seen: float
    last_recalled: float = field(init=False)
    recalls: int = 0
    sessions: dict[int, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.last_recalled = self.first_seen

    def recalled(self, session: int, now: float) -> None:
        """Count one more recall."""
        self.recalls += 1
        self.last_recalled = now
        self.sessions.pop(session, None)
        self.sessions[session] = None
        while len(self.sessions) > _SESSIONS:
            del self.sessions[next(iter(self.sessions))]
