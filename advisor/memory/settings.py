"""Settings of a memory: budgets, watermarks, and what happens to blocks that leave."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final

from ...graph.errors import ConfigError

LEAST_BUDGET: Final = 64  # tokens; chosen: less holds no question and answer
ATTENTION_WEIGHT: Final = 0.3
"""Weight of attention in a score, if a sidecar reports it. Chosen: samples of a few steps count
less than what the user refers to.
"""


class Mode(StrEnum):
    """What happens to blocks that leave the prompt."""

    DISCARD = "discard"
    BREADCRUMB = "breadcrumb"
    KV_RESTORE = "kv_restore"


@dataclass(frozen=True, slots=True)
class MemorySettings:
    budget: int  # tokens of a chat's prompt and answer together
    # ``high``, ``low``: shares of the budget: above ``high``, blocks leave until ``low`` is
    # reached.
    high: float = 0.9
    low: float = 0.7
    mode: Mode = Mode.KV_RESTORE  # what happens to them
    top: int = 4  # most blocks that a user's message can refer to
    least_similarity: float = 0.1  # below it, a message does not refer to a block
    resident_gate: bool = True  # whether blocks in the prompt count among ``top``
    # Weight of the model's attention in a score; similarity and recency share the rest.
    attention: float = 0.0
    sinks: int = 1  # blocks at the beginning, after the system's, that always stay
    tail: int = 2  # newest blocks that always stay
    # Tokens of the newest blocks that are placed after returning ones, because an engine splices
    # only next to whole blocks that it holds; chosen: two of the largest common blocks.
    settled: int = 64
    # If those newest blocks have more tokens than this, returning blocks are placed after them;
    # chosen, for engines that compute what moves.
    most_moved: int = 1024
    shortest: int = 32  # shortest block in tokens that engines splice; chosen: their default
    strip_think: bool = True  # whether an assistant's reasoning leaves the prompt after its turn
    # Key of the hash that gives each API key its own cache salt if recall is used; with None, one
    # caller's text may be reused for another.
    salt_key: bytes | None = field(default_factory=lambda: secrets.token_bytes(32), repr=False)

    def __post_init__(self) -> None:
        if self.budget < LEAST_BUDGET:
            raise ConfigError(f"budget = {self.budget}: allowed: {LEAST_BUDGET} tokens or more")
        if not 0 < self.low <= self.high <= 1:
            raise ConfigError(
                f"low = {self.low:g}, high = {self.high:g}: allowed: 0 < low ≤ high ≤ 1"
            )


@dataclass(frozen=True, slots=True)
class ChatStoreSettings:
    ram_bytes: int = 512 << 20  # for the text of all chats
    # Keeps chats across restarts, in clear text; None for memory only.
    directory: Path | None = None
    disk_bytes: int = 4 << 30  # limit of that directory; the least recently used chats go first
