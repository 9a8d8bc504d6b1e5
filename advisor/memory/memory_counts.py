"""``MemoryCounts``: what happened in a memory so far."""

from __future__ import annotations

from dataclasses import dataclass

from .chats.chat_session import ChatSession


@dataclass
class MemoryCounts:
    """What happened so far.

    Attributes:
        turns: Requests of chats.
        evicted, recalled: Blocks that left prompts, and that came back, as their chats count them.
        beyond: Prompts that were longer than the budget, for want of blocks that may leave.
        as_sent: Requests that the engine refused as we put them: it got what their client meant.
        plain: Requests that it got without hints, since it takes none.
        unscored: Times that similarity could not be asked for.
        refused, unserved, left: As a proxy counts them.
    """

    turns: int = 0
    refused: int = 0
    unserved: int = 0
    left: int = 0
    evicted: int = 0
    recalled: int = 0
    beyond: int = 0
    as_sent: int = 0
    plain: int = 0
    unscored: int = 0

    def note(self, chat: ChatSession, left: int, back: int) -> None:
        """Count blocks that left a chat's prompt, and that came back, here and there."""
        chat.evictions += left
        chat.recalls += back
        self.evicted += left
        self.recalled += back
