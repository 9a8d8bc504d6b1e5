"""Evictions as the page shows them, and why protected blocks were among them."""

from __future__ import annotations

from typing import Final

from ....dashboards.answers.evictions import (
    Evictions,
    EvictionsAsked,
    EvictionView,
    RuleTotal,
)
from ....dashboards.answers.log_marks import mark_of, number_in
from ....graph.errors import GraphError
from ....graph.logs.evictions.eviction_log import LIMIT, UNPLACED, EvictionLog
from ....graph.logs.history import WINDOW_S
from ....graph.logs.reasons import RULE_NAMES, DepartureRule
from ....graph.logs.small_times import seconds_of
from ....graph.queries.views import block_name
from ....graph.tables.tables import Tables
from ....graph.types import LAYER_NAMES, NO_ROW, STATE_NAMES, Tier, as_keys
from ...reasons.miss_words import eviction_sentence
from ...reasons.term_words import meanings, scored
from ...times.unix_time import Unix

_COPIES: Final = {
    Tier.NONE: "none",
    Tier.WARM: "warm",
    Tier.COLD: "cold",
    Tier.WARM | Tier.COLD: "warm and cold",
}
_STATES: Final = (*STATE_NAMES, "none")


def evictions_view(tables: Tables, which: EvictionsAsked, now: float, unix: Unix) -> Evictions:
    """Recent evictions of one engine, the newest first."""
    history, name, since = tables.history, chosen_engine(tables, which.engine), None
    log = history.evictions.get(tables.engines[name]) if name is not None else None
    views: list[EvictionView] = []
    if log is not None and name is not None:
        newest = log.next if which.before is None else min(which.before, log.next)
        numbers = range(newest - 1, max(newest - 1 - which.limit, log.first - 1), -1)
        since = number_in(which.after, log.name, log.next)
        views = [
            eviction_view(tables, name, log, number, unix)
            for number in numbers
            if since is None or number > since or log.record(number)["wanted"]
        ]
    rules = {} if log is None else log.by_rule()
    more = bool(views) and log is not None and views[-1].id > log.first
    return Evictions(
        at=unix(now),
        engine=name,
        engines=list(tables.engines),
        window_s=WINDOW_S,
        evictions=views,
        next=views[-1].id if more and since is None else None,
        since=since,
        mark=None if log is None or not log.next else mark_of(log.name, log.next - 1),
        rules={rule: RuleTotal(evicted=gone, wanted=back) for rule, (gone, back) in rules.items()},
        kept=LIMIT,
        meanings=meanings({name for view in views for name in view.terms or ()}),
        protected_lost=None if log is None else protected_lost(log),
    )


def eviction_view(
    tables: Tables, engine: str, log: EvictionLog, number: int, unix: Unix
) -> EvictionView:
    """One block that left."""
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


def chosen_engine(tables: Tables, engine: str | None) -> str | None:
    """The engine that is asked about: the first where none is named; None where there is none."""
    if engine is None:
        return next(iter(tables.engines), None)
    if engine not in tables.engines:
        raise GraphError("no engine of that id is connected")
    return engine


def _named(tables: Tables, column: int, key: int) -> tuple[str, str | None]:
    """A block as engines call it, and whose it is by now."""
    salt = int(tables.salt(column))
    row = int(tables.blocks.find(as_keys([key]))[0])
    session = NO_ROW if row == NO_ROW else int(tables.blocks.session[row])
    name = None if session == NO_ROW else tables.sessions.names[session]
    return block_name(key ^ salt), name


def protected_lost(log: EvictionLog) -> str | None:
    """Why blocks of protected layers left all the same, and what to do; None where none did."""
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
