"""The logs as the page shows them: requests, misses, evictions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Final

from ...dashboards.api.evictions import Evictions, EvictionView, RuleTotal
from ...dashboards.api.misses import BlockCounts, Loss, Miss, Misses, ReasonTotal, RequestView
from ...graph.errors import GraphError
from ...graph.logs.eviction_log import UNPLACED, EvictionLog
from ...graph.logs.history import MINUTE_COLUMNS, WINDOW_S, History
from ...graph.logs.reasons import REASON_NAMES, REASON_TEXTS, RULE_NAMES, Reason, Rule
from ...graph.logs.request_log import RequestNames
from ...graph.logs.small_times import seconds_of
from ...graph.queries.views import block_name
from ...graph.tables.tables import Tables
from ...graph.types import LAYER_NAMES, NO_ROW, SessionState, as_keys
from ..reasons.miss_words import eviction_sentence, miss_sentence
from ..reasons.remedies import remedy
from .work_ahead import wait_of

Unix = Callable[[float], float]
"""Turns a time of the graph's clock into Unix seconds."""

_COPIES: Final = ("none", "warm", "cold", "warm and cold")
_STATES: Final = (*(state.name.lower() for state in SessionState), "none")
_MOST: Final = 0.95  # share of what was lost that the stated capacity would have kept; chosen


def request_views(
    history: History,
    limit: int,
    before: int | None,
    session: str | None,
    unix: Unix,
    search: str = "",
) -> Iterator[RequestView]:
    """Up to ``limit`` requests older than ``before``, the newest first.

    Args:
        session: Only this one's; None: all.
        search: Only those whose id, session or tenant contains this.
    """
    newest = history.requests.next if before is None else min(before, history.requests.next)
    left = limit
    for number in range(newest - 1, history.requests.first - 1, -1):
        names = history.requests.names(number)
        if session in (None, names.session) and _matches(names, search.lower()):
            yield request_view(history, number, unix)
            left -= 1
        if not left:
            return


def _matches(names: RequestNames, search: str) -> bool:
    said = names.request, names.session or "", names.tenant or ""
    return not search or any(search in each.lower() for each in said)


def request_view(history: History, number: int, unix: Unix) -> RequestView:
    """One request."""
    record, names = history.requests.record(number), history.requests.names(number)
    asked, pool, loaded, prefetched, spliced = (
        int(record[name]) for name in ("asked", "pool", "loaded", "prefetched", "spliced")
    )
    return RequestView(
        id=number,
        request=names.request,
        engine=names.engine,
        session=names.session,
        tenant=names.tenant,
        at=unix(float(record["at"])),
        waited_s=round(float(record["waited"]), 3),
        wait=wait_of(history.requests, number),
        prompt_tokens=int(record["tokens"]),
        block_size=int(record["size"]),
        blocks=BlockCounts(
            asked=asked,
            pool=pool,
            loaded=loaded,
            prefetched=prefetched,
            spliced=spliced,
            computed=asked - pool - loaded - prefetched - spliced,
        ),
        again=int(record["again"]),
        finished=names.finished,
        ended_at=_known(float(record["ended"]), unix),
        answer_tokens=None if math.isnan(float(record["ended"])) else int(record["answer"]),
        expected_pause_s=_known(float(record["pause"])),
        miss=_miss(history, number, unix),
    )


def _known(value: float, unix: Unix = float) -> float | None:
    return None if math.isnan(value) else unix(value)


def _miss(history: History, number: int, unix: Unix) -> Miss:
    record, names = history.requests.record(number), history.requests.names(number)
    reason, index = Reason(int(record["reason"])), int(record["index"])
    detail, short = int(record["detail"]), int(record["short"])
    left, eviction = float(record["left"]), int(record["eviction"])
    ago = None if math.isnan(left) else float(record["at"]) - left
    session, tenant = names.other
    place, same = (index, int(record["asked"])), int(record["same"])
    token = index * int(record["size"]) + same if same else None
    return Miss(
        index=index,
        reason=REASON_NAMES[reason],
        sentence=miss_sentence(reason, detail, place, ago, session, names.other_engine, token),
        remedy=remedy(reason, detail, index, short),
        key=block_name(int(record["key"])) if record["key"] else None,
        token=token,
        session=session,
        tenant=tenant,
        engine=names.other_engine,
        eviction=eviction if eviction >= 0 else None,
        evicted_at=_known(left, unix),
    )


def misses_view(history: History, pools: int, now: float, unix: Unix) -> Misses:
    """Totals by reason, and over the last hours.

    Args:
        pools: Blocks of all pools.
        now: By the graph's clock.
    """
    starts, sums = history.reasons.series(now)
    count = len(REASON_NAMES)
    columns = sums.T.tolist() if len(sums) else [[] for _ in range(2 * count)]
    totals = history.totals.tolist()
    return Misses(
        at=unix(now),
        reasons=REASON_TEXTS,
        totals={
            name: ReasonTotal(requests=totals[at], blocks=totals[count + at])
            for at, name in enumerate(REASON_NAMES)
        },
        step_s=history.reasons.step_s,
        starts=[unix(start) for start in starts],
        requests=dict(zip(REASON_NAMES, columns[:count], strict=True)),
        blocks=dict(zip(REASON_NAMES, columns[count:], strict=True)),
        **_minutes(history, starts, now),
        loss=_loss(history, pools),
    )


def _minutes(history: History, starts: list[float], now: float) -> dict[str, list[int]]:
    """What the same steps brought besides; nothing where none was counted."""
    known, sums = history.minutes.series(now)
    rows = dict(zip(known, sums.tolist(), strict=True))
    none = [0] * len(MINUTE_COLUMNS)
    columns = zip(*(rows.get(start, none) for start in starts), strict=True)
    lists = [list(column) for column in columns] or [[] for _ in MINUTE_COLUMNS]
    return dict(zip(MINUTE_COLUMNS, lists, strict=True))


def _loss(history: History, pools: int) -> Loss:
    multi, cross = history.lost.tolist()
    capacities = [_enough(buckets, pools) for buckets in history.beyond.tolist()]
    return Loss(
        multi_turn=multi,
        cross_session=cross,
        capacity_multi_turn=capacities[0],
        capacity_cross_session=capacities[1],
    )


def _enough(buckets: list[int], pools: int) -> int | None:
    """Blocks of pool with which most of what was lost would have stayed."""
    total, so_far = sum(buckets), 0
    for power, count in enumerate(buckets):
        so_far += count
        if total and so_far >= _MOST * total:
            return int(pools + (1 << power))
    return None


def evictions_view(
    tables: Tables, engine: str | None, limit: int, before: int | None, now: float, unix: Unix
) -> Evictions:
    """Recent evictions of one engine, the newest first."""
    history = tables.history
    name = chosen(tables, engine)
    log = history.evictions.get(tables.engines[name]) if name is not None else None
    views: list[EvictionView] = []
    if log is not None and name is not None:
        newest = log.next if before is None else min(before, log.next)
        numbers = range(newest - 1, max(newest - 1 - limit, log.first - 1), -1)
        views = [eviction_view(tables, name, log, number, unix) for number in numbers]
    more = bool(views) and log is not None and views[-1].id > log.first
    return Evictions(
        at=unix(now),
        engine=name,
        engines=list(tables.engines),
        window_s=WINDOW_S,
        evictions=views,
        next=views[-1].id if more else None,
        rules=_rules(log),
        protected_lost=None if log is None else protected_lost(log),
    )


def eviction_view(
    tables: Tables, engine: str, log: EvictionLog, number: int, unix: Unix
) -> EvictionView:
    """One block that left."""
    record, left = log.record(number), log.at(number)
    state, rule, layer = int(record["state"]), int(record["why"]) >> 4, int(record["why"]) & 15
    doing, place = (state >> 2) & 7, int(record["place"])
    idle = seconds_of(record["idle"])
    key, session = _named(tables, tables.engines[engine], int(record["key"]))
    return EvictionView(
        id=number,
        at=unix(left),
        engine=engine,
        key=key,
        rule=RULE_NAMES[rule],
        sentence=eviction_sentence(rule, place if place != UNPLACED else None, idle, doing),
        ranking=tables.history.ranking_at(tables.engines[engine], left),
        place=place if place != UNPLACED else None,
        layer=LAYER_NAMES[layer],
        importance=round(int(record["worth"]) / 255, 2),
        hits=int(record["hits"]),
        idle_s=round(idle or 0.0, 1),
        shared=bool(state & 32),
        session=session,
        session_state=_STATES[min(doing, len(_STATES) - 1)],
        copied=_COPIES[state & 3],
        wanted_after_s=seconds_of(record["wanted"]),
    )


def chosen(tables: Tables, engine: str | None) -> str | None:
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


def _rules(log: EvictionLog | None) -> dict[str, RuleTotal]:
    if log is None:
        return {}
    counts = zip(RULE_NAMES, log.evicted.tolist(), log.wanted.tolist(), strict=True)
    return {name: RuleTotal(evicted=gone, wanted=back) for name, gone, back in counts if gone}


def protected_lost(log: EvictionLog) -> str | None:
    """Why blocks of protected layers left all the same, and what to do; None where none did."""
    kept, beyond = (int(log.evicted[r]) for r in (Rule.PROTECTED_LAYER, Rule.PROTECTED_SHARE))
    said = []
    if kept:
        said.append(
            f"{kept:,} protected blocks were evicted: nothing else was left, or the engine had "
            "gone without advice for too long. A larger pool keeps them, or protecting less."
        )
    if beyond:
        said.append(
            f"{beyond:,} blocks of protected layers were evicted, since more of them is in the "
            "pool than [score] protected_share and tenant_share keep. Protect less, or raise these."
        )
    return " ".join(said) or None
