"""What the sidecar reports to the HTTP surface: its status, its engines, and totals of its logs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..graph.errors import KvGraphError
from ..graph.ranking.policy import PolicyChoice
from ..graph.stats import EngineStats, GraphStats
from ..graph.wire.advice import AdmissionAdvice
from ..graph.wire.events import TierReport


class BusyError(KvGraphError):
    """The graph is too busy to answer, for ``again_in_s`` seconds."""

    def __init__(self, why: str, again_in_s: int) -> None:
        super().__init__(f"{why}; try again in {again_in_s} s")
        self.again_in_s = again_in_s


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """One engine that the sidecar follows."""

    id: str  # stable for the life of the engine process
    name: str
    model: str
    version: str
    kind: str  # `hook` (takes advice) or `kv_events` (watched only)
    # synced; resyncing, waiting, replaying: it gets no advice for now; partial, degraded: some of
    # its history is lost for good.
    state: str
    silent_s: float | None
    gaps: int
    resyncs: int
    ranking_epoch: int | None = None
    ranking_age_s: float | None = None  # age of the last ranking sent to it
    ranked: int = 0
    ranked_protected: int = 0
    graph: EngineStats | None = None
    tiers: TierReport | None = None  # None without colder tiers
    ruling: PolicyChoice | None = None  # whether policy or LRU ranks; None if they are not compared
    room: AdmissionAdvice | None = None  # how much new context may start there
    ranked_by: str = "lru"  # a policy's name; lru if the engine keeps its own order
    hashing: str = ""  # how it hashes blocks, as text
    left_out: int = 0  # KV events of a watched engine that could not be read …
    last_left_out: str = ""  # and why the last of them was left out


@dataclass(frozen=True, slots=True)
class LogTotals:
    """What the logs counted since the start, for metrics."""

    tokens: Mapping[str, int]  # prompt tokens by source: pool, loaded, prefetched, computed
    reasons: Mapping[str, tuple[int, int]]  # reason of a miss → requests, blocks they computed
    lost: Mapping[str, int]  # recomputed blocks, of own turns or of shared prefixes
    rules: Mapping[tuple[str, str], tuple[int, int]]  # engine, rule → evictions, regretted ones
    # Engine, shadow → blocks requested, found; `ours` is the live pool.
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
    """The sidecar's state; thread-safe. Methods raise BusyError while the graph is busy."""

    def is_healthy(self) -> bool:
        """Return whether the loop runs and all rankings are fresh."""

    def not_ready(self) -> str | None:
        """Return why engines get no advice yet, as text; None once all linked engines do."""

    def totals(self) -> LogTotals:
        """Return the logs' counts; cheap."""

    def status(self) -> SidecarStatus:
        """Return the state of everything, now."""
