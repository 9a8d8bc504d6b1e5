"""``/v1/evictions``: which blocks left a pool, and by which rule."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter
from fastapi.responses import Response

from ...dashboards.answer import Answer, Part, mark_of, number_in
from ...graph.explain import block_name
from ...graph.logs.evictions import LIMIT, UNPLACED, EvictionLog
from ...graph.logs.history import WINDOW_S, LoggedTables
from ...graph.logs.reasons import RULE_NAMES, DepartureRule
from ...graph.logs.requests import seconds_of
from ...graph.types import LAYER_NAMES, NO_ROW, STATE_NAMES, Tier, as_keys
from ..words.times import Unix
from ..words.words import eviction_sentence, meanings, scored
from .page import (
    MarkQuery,
    NameQuery,
    NumberQuery,
    Page,
    RecordsQuery,
    answered,
    chosen_engine,
    recent,
)


class EvictionView(Part):
    """One block that left an engine's pool.

    Attributes:
        id: Its number in the engine's log.
        rule: The rule that decided it: ``policy``, ``superseded``, ``session_over``,
            ``protected_layer``, ``protected_share`` (its layer is protected only up to a share),
            ``lru`` (the engine's own order), ``unranked`` (not in the ranking).
        sentence: The same in words.
        ranking: Epoch of the ranking in force; None without one.
        place: Number of blocks before it in that ranking; None if it was not in the ranking.
        terms: Terms of its score when it was ranked; None if the ranking did not decide, placed it
            further back than terms are kept, or was made too long ago.
        layer, importance, hits, idle_s, shared: The block's state then. ``hits`` stops at 255.
        session: The session that used it last; None if unknown.
        session_state: The state of that session then.
        copied: ``warm``, ``cold``, ``warm and cold``, or ``none``.
        wanted_after_s: Seconds after which a request needed it again, within the window; None if
            none did.
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


class Evictions(Answer):
    """Recent evictions of one engine, the newest first.

    Attributes:
        engines: All engines that have a log.
        window_s: Seconds within which a block must be computed again to count as regretted.
        rules: Totals of this engine since the start.
        since: The eviction of the given mark: up to it, only evictions whose block was requested
            again are listed. None: all are listed.
        mark: Pass it as ``after`` to get later evictions; None before any eviction.
        kept: Number of evictions that the log stores.
        meanings: Meanings of the terms, in words.
        protected_lost: Why protected blocks were evicted anyway, in words.
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


def add_routes(paths: APIRouter, page: Page) -> None:
    @paths.get("/evictions", response_model=Evictions)
    def evictions(
        engine: NameQuery = None,
        limit: RecordsQuery = 100,
        before: NumberQuery = None,
        after: MarkQuery = "",
    ) -> Response:
        return answered(evictions_of(page, limit, engine, before, after))


_COPIES: Final = {
    Tier.NONE: "none",
    Tier.WARM: "warm",
    Tier.COLD: "cold",
    Tier.WARM | Tier.COLD: "warm and cold",
}
_STATES: Final = (*STATE_NAMES, "none")


@recent
def evictions_of(
    page: Page, limit: int, engine: str | None = None, before: int | None = None, after: str = ""
) -> Evictions:
    """Return the newest ``limit`` evictions of an engine, or of the first one: those before a
    number, or those new since the mark ``after``.
    """
    tables = page.graph.tables
    with page.questions.turn():
        history, name, since = tables.history, chosen_engine(tables, engine), None
        log = history.evictions.get(tables.engines[name]) if name is not None else None
        views: list[EvictionView] = []
        if log is not None and name is not None:
            newest = log.next if before is None else min(before, log.next)
            numbers = range(newest - 1, max(newest - 1 - limit, log.first - 1), -1)
            since = number_in(after, log.name, log.next)
            views = [
                eviction_view(tables, name, log, number, page.unix)
                for number in numbers
                if since is None or number > since or log.record(number)["wanted"]
            ]
        rules = {} if log is None else log.by_rule()
        more = bool(views) and log is not None and views[-1].id > log.first
        return Evictions(
            at=page.unix(page.graph.clock()),
            engine=name,
            engines=list(tables.engines),
            window_s=WINDOW_S,
            evictions=views,
            next=views[-1].id if more and since is None else None,
            since=since,
            mark=None if log is None or not log.next else mark_of(log.name, log.next - 1),
            rules={
                rule: RuleTotal(evicted=gone, wanted=back) for rule, (gone, back) in rules.items()
            },
            kept=LIMIT,
            meanings=meanings({name for view in views for name in view.terms or ()}),
            protected_lost=None if log is None else protected_lost(log),
        )


def eviction_view(
    tables: LoggedTables, engine: str, log: EvictionLog, number: int, unix: Unix
) -> EvictionView:
    record, left, packed = log.record(number), log.at(number), log.eviction(number)
    place, doing = int(record["place"]), packed.session_state
    idle = seconds_of(record["idle"])
    terms = log.terms.of(number)
    key, session = _named(tables, tables.engines[engine], int(record["key"]))
    return EvictionView(
        id=number,
        at=unix(left),
        engine=engine,
        key=key,
        rule=RULE_NAMES[packed.rule],
        sentence=eviction_sentence(
            packed.rule, place if place != UNPLACED else None, idle, doing, scored(terms)
        ),
        ranking=tables.history.ranking_at(tables.engines[engine], left),
        place=place if place != UNPLACED else None,
        terms=None if terms is None else {name: round(part, 3) for name, part in terms.items()},
        layer=LAYER_NAMES[packed.layer],
        importance=round(int(record["worth"]) / 255, 2),
        hits=int(record["hits"]),
        idle_s=round(idle or 0.0, 1),
        shared=packed.shared,
        session=session,
        session_state=_STATES[doing],
        copied=_COPIES[packed.copies],
        wanted_after_s=seconds_of(record["wanted"]),
    )


def _named(tables: LoggedTables, column: int, key: int) -> tuple[str, str | None]:
    """A block's key as engines know it, and the session that owns it now."""
    salt = int(tables.salt(column))
    row = int(tables.blocks.find(as_keys([key]))[0])
    session = NO_ROW if row == NO_ROW else int(tables.blocks.session[row])
    name = None if session == NO_ROW else tables.sessions.names[session]
    return block_name(key ^ salt), name


def protected_lost(log: EvictionLog) -> str | None:
    """Describe why protected blocks were evicted, and what to do about it; None if none were."""
    kept, beyond = (
        int(log.evicted[r]) for r in (DepartureRule.PROTECTED_LAYER, DepartureRule.PROTECTED_SHARE)
    )
    said = []
    if kept:
        said.append(
            f"{kept:,} protected blocks were evicted: nothing else was left, or the engine had "
            "gone without advice for too long. A larger pool keeps them, or protecting less."
        )
    if beyond:
        said.append(
            f"{beyond:,} blocks of protected layers were evicted: more of them is in the pool than "
            "may be kept for its price. Protect less, or say how much it may cost ([score] "
            "protected_price_points) or how much is kept ([score] protected_share, tenant_share)."
        )
    return " ".join(said) or None
