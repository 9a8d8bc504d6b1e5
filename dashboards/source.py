"""What the sidecar reports to the HTTP surface: its status, its engines, and totals of its logs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..graph.errors import KvGraphError
from ..graph.ranking.policy import Ruling
from ..graph.stats import EngineStats, GraphStats
from ..graph.wire.advice import AdmissionAdvice
from ..graph.wire.events import TierReport


class BusyError(KvGraphError):
    """The graph is too busy to answer.

    Args:
        why: The reason, in words.
        again_in_s: Whole seconds after which to ask again.
    """

    def __init__(self, why: str, again_in_s: int) -> None:
        super().__init__(f"{why}; try again in {again_in_s} s")
        self.again_in_s = again_in_s


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """One engine that the sidecar follows.

    Attributes:
        id: Stable for the life of the engine process.
        kind: ``hook`` (takes advice) or ``kv_events`` (watched only).
        state: ``synced``; ``resyncing``, ``waiting``, ``replaying``: advice is withheld for now;
            ``partial``, ``degraded``: some of its history is lost for good.
        ranking_age_s: Age of the last ranking sent to it; None before any.
        tiers: State and counters of its colder tiers; None without any.
        ruling: The guard's comparison of policy and LRU; None where it compares nothing.
        room: How much new context may start there; None before any advice.
        ranked_by: The policy's name, or ``lru`` where the engine keeps its own order.
        hashing: How it hashes blocks, in words; empty if unknown.
        left_out: KV events of a watched engine that could not be read and do not count.
        last_left_out: Why the last of these could not be read.
    """

    id: str
    name: str
    model: str
    version: str
    kind: str
    state: str
    silent_s: float | None
    gaps: int
    resyncs: int
    ranking_epoch: int | None
    ranking_age_s: float | None
    ranked: int
    ranked_protected: int
    graph: EngineStats | None
    tiers: TierReport | None
    ruling: Ruling | None = None
    room: AdmissionAdvice | None = None
    ranked_by: str = "lru"
    hashing: str = ""
    left_out: int = 0
    last_left_out: str = ""


@dataclass(frozen=True, slots=True)
class LogTotals:
    """What the logs counted since the start, for metrics.

    Attributes:
        tokens: Prompt tokens by source: pool, loaded, prefetched, computed.
        reasons: Requests and the blocks that they computed, by reason of their miss.
        lost: Recomputed blocks, by whether they were of own turns or shared prefixes.
        rules: Evictions and regretted evictions, by engine and rule.
        shadows: Blocks asked for and found, by engine and shadow; ``ours`` is the live pool.
        log_bytes: Memory of the logs.
    """

    tokens: Mapping[str, int]
    reasons: Mapping[str, tuple[int, int]]
    lost: Mapping[str, int]
    rules: Mapping[tuple[str, str], tuple[int, int]]
    shadows: Mapping[tuple[str, str], tuple[int, int]]
    log_bytes: int


@dataclass(frozen=True, slots=True)
class SidecarStatus:
    """Everything about a sidecar at one moment, for people and for metrics.

    ``counters``, group → what → count, start with the sidecar; their names are the sidecar's own,
    never input. ``lost`` is seconds since the last engines left for good, by name.
    """

    version: str
    pid: int
    uptime_s: float
    endpoint: str
    http: str
    engines: tuple[EngineStatus, ...]
    graph: GraphStats
    counters: Mapping[str, Mapping[str, int]]
    snapshot: Mapping[str, Any]
    config: Mapping[str, Any]
    lost: Mapping[str, float] = field(default_factory=dict)


class StatusSource(Protocol):
    """How the sidecar is; thread-safe. Raises BusyError while the graph is busy."""

    def is_healthy(self) -> bool:
        """Whether the loop turns and all rankings are fresh."""

    def not_ready(self) -> str | None:
        """Why engines get no advice yet, in words; None once all linked engines do."""

    def totals(self) -> LogTotals:
        """What the logs counted; cheap."""

    def status(self) -> SidecarStatus:
        """The state of everything, now."""
