"""Requests as the page shows them, each with its first miss."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice

from ....dashboards.answers.misses import BlockCounts, Miss, RequestsAsked, RequestView
from ....graph.logs.history import History
from ....graph.logs.reasons import REASON_NAMES, Reason
from ....graph.logs.request_log import RequestLog
from ....graph.queries.views import block_name
from ...reasons.miss_words import Gone, miss_sentence
from ...reasons.term_words import scored
from ...times.unix_time import Unix
from .request_remedies import prompt_seconds, remedies
from .work_ahead import wait_of


def request_views(
    history: History, which: RequestsAsked, now: float, unix: Unix
) -> Iterator[RequestView]:
    """The requests that are asked for; ``now`` is by the graph's clock."""
    log = history.requests
    newest = log.next if which.before is None else min(which.before, log.next)
    in_order = range(newest - 1, log.first - 1, -1)
    numbers = log.slowest(now).tolist() if which.is_slowest else in_order
    wanted = (number for number in numbers if number < newest and _fits(log, number, which))
    for number in islice(wanted, which.limit):
        yield request_view(history, number, unix)


def session_requests(
    history: History, session: str, tenant: str | None, unix: Unix
) -> Iterator[RequestView]:
    """The requests of one session, the newest first; another tenant's may have the same name."""
    log = history.requests
    for number in range(log.next - 1, log.first - 1, -1):
        names = log.names(number)
        if names.session == session and names.tenant == tenant:
            yield request_view(history, number, unix)


def _fits(log: RequestLog, number: int, which: RequestsAsked) -> bool:
    names, search = log.names(number), which.search.lower()
    if which.session not in (None, names.session):
        return False
    if which.reason not in (None, REASON_NAMES[log.record(number)["reason"]]):
        return False
    said = names.request, names.session or "", names.tenant or ""
    return not search or any(search in each.lower() for each in said)


def request_view(history: History, number: int, unix: Unix) -> RequestView:
    """One request."""
    record, names = history.requests.record(number), history.requests.names(number)
    asked, pool, loaded, prefetched, spliced = (
        int(record[name]) for name in ("asked", "pool", "loaded", "prefetched", "spliced")
    )
    ran = float(record["ran"]) if record["ran"] >= 0 else None  # NaN: it runs
    waited = wait_of(history, number)
    return RequestView(
        id=number,
        request=names.request,
        engine=names.engine,
        session=names.session,
        tenant=names.tenant,
        at=unix(float(record["at"])),
        waited_s=round(float(record["waited"]), 3),
        wait=None if waited is None else waited.wait,
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
        is_awaited=history.requests.is_awaited(number),
        ended_at=None if ran is None else unix(float(record["at"]) + ran),
        answer_tokens=None if ran is None else int(record["answer"]),
        expected_pause_s=_known(float(record["pause"])),
        prompt_s=prompt_seconds(history, number),
        miss=_miss(history, number, unix),
        remedies=remedies(history, number, None if waited is None else waited.remedy),
    )


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _miss(history: History, number: int, unix: Unix) -> Miss:
    record, names = history.requests.record(number), history.requests.names(number)
    reason, index = Reason(int(record["reason"])), int(record["index"])
    detail, eviction = int(record["detail"]), int(record["eviction"])
    left = Gone(_known(float(record["ago"])), float(record["waited"]), _score(history, number))
    session, tenant, engine = names.other
    group = history.group(names.engine, detail) if reason is Reason.OTHER_GROUP else None
    place, same = (index, int(record["asked"])), int(record["same"])
    token = index * int(record["size"]) + same if same else None
    return Miss(
        index=index,
        reason=REASON_NAMES[reason],
        sentence=miss_sentence(reason, detail, place, left, session, engine, token, group),
        key=block_name(int(record["key"])) if record["key"] else None,
        token=token,
        session=session,
        tenant=tenant,
        engine=engine,
        eviction=eviction if eviction >= 0 else None,
        evicted_at=None if left.ago_s is None else unix(float(record["at"]) - left.ago_s),
    )


def _score(history: History, number: int) -> str | None:
    """What the policy's score said of the missing block when it left, while that is remembered."""
    eviction = int(history.requests.record(number)["eviction"])
    log = history.evictions_of(history.requests.names(number).engine)
    if log is None or not log.first <= eviction < log.next:
        return None
    return scored(log.terms.of(eviction))
