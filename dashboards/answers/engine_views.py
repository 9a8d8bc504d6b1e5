"""``/v1/engines``: health, gaps, drops, versions, occupancy, traffic of tiers."""

from __future__ import annotations

from typing import Any

from .answer import Answer, Part


class RoomView(Part):
    """Who waits on one engine until there is room for its context, who did lately, and whether a
    limit was lifted since it saved nothing.

    Attributes:
        waiting: Requests that are held now.
        oldest_s: How long the first of them has been.
        fitting: Sessions that fit; None where the engine was told nothing yet.
        live: Sessions that are live; None as above.
        begun: Requests of the last ten minutes that the log remembers and that were held before.
        longest_s: The longest that one of these was held.
        sentence: All that in words.
    """

    engine: str
    waiting: int
    oldest_s: float
    fitting: int | None
    live: int | None
    begun: int
    longest_s: float
    sentence: str


class HoldEnd(Part):
    """Requests that were held until there was room, by why they waited no longer.

    Attributes:
        reason: One of ``room``, ``bound``, ``idle``, ``open``, ``silence``, ``gone``, ``patience``.
        until: What it means, in words.
    """

    reason: str
    until: str
    requests: int


class AdmissionView(Part):
    """Whom an engine holds until there is room, and held since its start.

    Attributes:
        facts: In words, by their names, in the order in which to show them.
        ends: Only reasons that occurred.
    """

    facts: dict[str, str]
    ends: list[HoldEnd]


class EngineView(Part):
    """One engine; ``status`` is its entry of ``/status``, whose keys are told there.

    Attributes:
        state: ``synced``, ``resyncing``, ``waiting``, ``replaying``, ``partial``, ``degraded``.
        summary: One sentence: what it is doing, and what is wrong with it if anything is.
        ranked_by: The policy's name, or ``lru`` where the engine keeps its own order.
        guard: How the policy does beside LRU, in a few words; or that nobody compares them.
        dropped: Events that never reached the sidecar; None where it never said.
        hit_share: Of prompt tokens, found, since the sidecar's start; None before any.
        prefetch_useful: Share of prefetched blocks that a request then found; None before any.
        admission: Whom it holds until there is room; None where it never held anybody.
    """

    id: str
    name: str
    model: str
    version: str
    kind: str
    state: str
    summary: str
    ranked_by: str
    guard: str
    ranking_age_s: float | None
    gaps: int
    resyncs: int
    dropped: int | None
    hit_share: float | None
    prefetch_useful: float | None
    admission: AdmissionView | None
    status: dict[str, Any]


class Engines(Answer):
    """All engines, and the sidecar that follows them; ``counters`` are those of ``/status``."""

    version: str
    uptime_s: float
    endpoint: str
    engines: list[EngineView]
    counters: dict[str, dict[str, int]]
