"""``/v1/evictions`` and ``/v1/ranking``: who left, by which rule, and who is next."""

from __future__ import annotations

from typing import NamedTuple

from .answer import Answer, Part


class EvictionView(Part):
    """One block that left an engine's pool.

    Attributes:
        id: Its place in the engine's log.
        rule: What decided it: ``policy``, ``superseded``, ``session_over``, ``protected_layer``,
            ``protected_share`` (its layer is protected only up to a share), ``lru`` (the engine's
            own order held), ``unranked`` (the ranking did not name it).
        sentence: The same in words.
        ranking: The ranking in force, by its epoch; None without one.
        place: How many stood before it there; None where it was not named.
        terms: What its score was made of when it was ranked; None where the ranking did not decide,
            or named it further back than terms are kept, or it left too long ago.
        layer, importance, hits, idle_s, shared: What was known of it then. ``hits`` stops at 255.
        session: Whose it was last; None where nobody knows any more.
        session_state: What that session did then.
        copied: ``warm``, ``cold``, ``warm and cold``, or ``none``.
        wanted_after_s: After how long a request wanted it again, within the window; None: none did.
    """

    id: int
    at: float
    engine: str
    key: str
    rule: str
    sentence: str
    ranking: int | None
    place: int | None
    terms: dict[str, float] | None
    layer: str
    importance: float
    hits: int
    idle_s: float
    shared: bool
    session: str | None
    session_state: str
    copied: str
    wanted_after_s: float | None


class RuleTotal(Part):
    """Evictions by one rule since the start, and how many of them were regretted."""

    evicted: int
    wanted: int


class EvictionsAsked(NamedTuple):
    """Which evictions are asked for.

    Attributes:
        limit: So many at most, the newest.
        engine: Whose; None: the first one's.
        before: Only those before this one; None: all.
        after: The mark of an earlier answer; "": none.
    """

    limit: int
    engine: str | None = None
    before: int | None = None
    after: str = ""


class Evictions(Answer):
    """Recent evictions of one engine, the newest first.

    Attributes:
        engines: All engines that have a log.
        window_s: How long after its eviction a block counts as regretted.
        rules: Since the start, of this engine.
        since: The eviction of the mark that was asked with: of those up to it, only the ones that
            were wanted again are told. None: all are told.
        mark: To ask with for what comes next; None before any.
        kept: How many evictions the log remembers.
        meanings: What the terms mean, in words.
        protected_lost: Protected blocks that it lost all the same, and why, in words.
    """

    engine: str | None
    engines: list[str]
    window_s: float
    evictions: list[EvictionView]
    next: int | None
    since: int | None
    mark: str | None
    rules: dict[str, RuleTotal]
    kept: int
    meanings: dict[str, str]
    protected_lost: str | None


class RankedBlock(Part):
    """One block of the ranking; ``terms`` are in the order of the answer's ``terms``."""

    place: int
    key: str
    layer: str
    session: str | None
    tenant: str | None
    identity: str | None
    score: float
    terms: list[float]
    standing: list[str]


class RankingView(Answer):
    """The ranking that an engine has now, the next to go first.

    Attributes:
        ranked_by: The policy's name, or ``lru``: then ``order`` is what the engine does by itself.
        sentence: Who ranks and why, in words.
        terms: The names of the terms that make a score.
        meanings: What these terms mean, and the rules that bind some of these blocks, in words.
        ranked: How many blocks the whole order has.
        protected: How many are to go only when nothing else is left.
    """

    engine: str | None
    engines: list[str]
    ranked_by: str
    sentence: str
    epoch: int | None
    age_s: float | None
    terms: list[str]
    meanings: dict[str, str]
    order: list[RankedBlock]
    ranked: int
    protected: int
