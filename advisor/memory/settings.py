"""What the operator chooses: budgets, watermarks, what happens to what leaves."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final

from ...graph.errors import ConfigError

LEAST_BUDGET: Final = 64  # tokens; chosen: less holds no question and answer
FLOORS: Final = {"system": 1.0, "user": 0.2, "assistant": 0.1, "tool": 0.0}
"""The least score of a block by its source; chosen: what people say costs little and means much."""

LOOKS: Final = 0.3
"""The weight of attention in a score where a sidecar tells of it; chosen: what samples saw of a few
steps counts for less than what the user speaks of."""


class Mode(StrEnum):
    """What becomes of blocks that leave the prompt."""

    DISCARD = "discard"
    BREADCRUMB = "breadcrumb"
    KV_RESTORE = "kv_restore"


@dataclass(frozen=True, slots=True)
class MemorySettings:
    """All that a memory is told at its start.

    Attributes:
        budget: Tokens of a chat's prompt and answer together.
        high, low: Shares of it: above the first, blocks leave until the second is reached.
        mode: What becomes of them.
        top: How many blocks a user's message may be about.
        least_similarity: Below it, a message is not about a block.
        resident_gate: Whether blocks that are in the prompt count among ``top``.
        similarity, recency: Weights of both in a score; together 1.
        attention: Weight of where the model looks; the other two share the rest.
        half_life: Turns after which recency is half.
        sinks: Blocks behind the system's at the beginning of a chat that always stay.
        tail: Newest blocks that always stay.
        settled: Tokens of the newest blocks that stand behind what comes back: an engine splices
            only what adjoins text that it holds, and it holds whole blocks of its own alone.
            Chosen: two of the largest that are common.
        most_moved: If those newest blocks take more tokens than this, what comes back stands behind
            them after all; chosen, for engines that compute what moves.
        shortest: Blocks of fewer tokens are spliced by no engine; chosen: what engines splice at
            least unless their model's calibration says more.
        strip_think: Whether thoughts leave the prompt with the turn that they belong to.
        salt_key: Of the keyed hash that gives each API key a cache salt of its own where recall is
            asked for; None: what one caller said may come back for another.
    """

    budget: int
    high: float = 0.9
    low: float = 0.7
    mode: Mode = Mode.KV_RESTORE
    top: int = 4
    least_similarity: float = 0.1
    resident_gate: bool = True
    similarity: float = 0.6
    recency: float = 0.4
    attention: float = 0.0
    half_life: float = 8.0
    sinks: int = 1
    tail: int = 2
    settled: int = 64
    most_moved: int = 1024
    shortest: int = 32
    strip_think: bool = True
    salt_key: bytes | None = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    floors: dict[str, float] = field(default_factory=lambda: dict(FLOORS))

    def __post_init__(self) -> None:
        if self.budget < LEAST_BUDGET:
            raise ConfigError(f"budget = {self.budget}: allowed: {LEAST_BUDGET} tokens or more")
        if not 0 < self.low <= self.high <= 1:
            raise ConfigError(
                f"low = {self.low:g}, high = {self.high:g}: allowed: 0 < low ≤ high ≤ 1"
            )


@dataclass(frozen=True, slots=True)
class EmbeddingSettings:
    """Who gives vectors of texts.

    Attributes:
        url: Of an OpenAI-compatible API, with its ``/v1``.
        model: As that server calls it.
        key: Of its API, if it wants one.
    """

    url: str
    model: str
    key: str | None = None


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """Where chats are kept.

    Attributes:
        ram_bytes: For the text of all chats.
        directory: Where they survive a restart, in clear text; None: nowhere.
        disk_bytes: Of that directory; the chats that were used longest ago go first.
    """

    ram_bytes: int = 512 << 20
    directory: Path | None = None
    disk_bytes: int = 4 << 30
