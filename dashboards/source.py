"""The contract that the sidecar implements for the HTTP surface."""

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
    """The graph cannot be asked just now.

    Args:
        why: What keeps it.
        again_in_s: When the same question may be asked again, whole seconds from now.
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
            ``partial``, ``degraded``: some of its history was lost and could not be had again.
        ranking_age_s: Seconds since the ranking that it was sent last was true; None: none yet.
        tiers: What its colder tiers hold and did; None without any.
        ruling: How the guard found policy and LRU to do there; None where it watches nothing.
        room: How much new context may start there; None: nothing was said yet.
        ranked_by: The policy's name, or ``lru`` where the engine keeps its own order.
        hashing: By what it tells blocks apart, in words; empty where it does not say.
        left_out: KV events of a watched engine that could not be read, and do not count.
        last_left_out: Why the last of them did not.
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
        tokens: Of prompts, by where they came from: pool, loaded, prefetched, computed.
        reasons: Requests, and blocks that they computed, by why they found no more.
        lost: Blocks computed again, by whose they were: own turns or shared prefixes.
        rules: Evictions, and how many of them were regretted, by engine and rule.
        shadows: Blocks asked for, and found, by engine and shadow; ``ours`` is the live pool.
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

    ``counters`` is counted since the start: group → what → how often. The names are the sidecar's
    own words, never input. ``lost`` has seconds since the last engines went that did not come back,
    by name.
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
    """Answers the HTTP surface's questions, from any thread; raises BusyError while it
    cannot."""

    def is_healthy(self) -> bool:
        """Whether the sidecar's own loop turns and its rankings are fresh."""

    def not_ready(self) -> str | None:
        """Why engines get no advice yet, in words; None where all that are linked get theirs."""

    def totals(self) -> LogTotals:
        """What the logs counted; costs little."""

    def status(self) -> SidecarStatus:
        """The state of everything, now."""
