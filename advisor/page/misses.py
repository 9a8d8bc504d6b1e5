"""``/v1/requests`` and ``/v1/misses``: what prompts found, and why they did not find more."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from typing import Annotated, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Query
from fastapi.responses import Response

from ...dashboards.answer import Answer, Part
from ...graph.explain import block_name
from ...graph.logs.history import MINUTE_COLUMNS, History
from ...graph.logs.reasons import REASON_NAMES, REASON_TEXTS, Reason
from ...graph.logs.requests import Hold, RequestLog
from ..words.times import Unix
from ..words.waits import (
    FirstMiss,
    WorkAhead,
    could_find_more,
    miss_remedy,
    wait_remedy,
    wait_sentence,
)
from ..words.words import Departure, miss_sentence, scored
from .page import NameQuery, NumberQuery, Page, RecordsQuery, answered, recent

ReasonQuery = Annotated[str | None, Query(pattern=f"^({'|'.join(REASON_NAMES)})$")]


class BlockCounts(Part):
    """Full blocks of one prompt by their source; they add up to ``asked``."""

    asked: int
    pool: int
    loaded: int
    prefetched: int
    spliced: int
    computed: int


class Miss(Part):
    """The first block that a prompt did not find, and why.

    The reason is known at once, or within 2 s, when the engine has reported that step's evictions.

    Attributes:
        index: Index of the block in the prompt, from 0.
        reason: One of ``never_seen``, ``diverged``, ``evicted``, ``other_engine``, ``load_slower``,
            ``copy_lost``, ``reset``, ``not_cacheable``, ``unknown``, ``other_salt``, ``in_store``,
            ``other_group``.
        sentence: The reason in words, with names, times and rules.
        key: The block's key; None if it has none (a partial block).
        token: For ``diverged``: index, from 0, of the first prompt token that differs from another
            recent prompt; None if the engine does not know both.
        session: The other session involved: the one that this prompt diverged from, or the block's
            last user.
        engine: For ``other_engine``: the engine that has the block.
        eviction: The eviction's ``id`` in ``/v1/evictions`` of the request's engine; None if
            unknown.
        evicted_at: When it was evicted; None if it was not.
    """

    index: int
    reason: str
    sentence: str
    key: str | None
    token: int | None
    session: str | None
    tenant: str | None
    engine: str | None
    eviction: int | None
    evicted_at: float | None


class Wait(Part):
    """What an engine did while a request waited for its turn there.

    Attributes:
        prompts: Number of prompts started in that time.
        tokens: Tokens computed for these prompts; without any, for the last prompt begun before.
        again: How many of these tokens had been in the engine's pool before.
        largest: The ``id`` of the request for which most was computed; None if nothing was
            computed.
        held_s: Seconds for which the request was held until there was room for its context; 0 if it
            was not held.
        until: Why it was released: ``room``, ``bound``, ``idle``, ``open``, ``silence`` or
            ``patience``; None if it was not held.
        sentence: The same in words.
    """

    prompts: int
    tokens: int
    again: int
    largest: int | None
    held_s: float = 0.0
    until: str | None = None
    sentence: str


class Remedy(Part):
    """What would have made a request faster.

    Attributes:
        of: The part of its time that this shortens: ``wait``, ``prompt`` or ``answer``.
        saves_s: Most seconds that this saves; 0: nothing could save any; None: unknown.
        text: The remedy in words.
    """

    of: Literal["wait", "prompt", "answer"]
    saves_s: float | None
    text: str


class RequestView(Part):
    """One request as its engine first scheduled it.

    Attributes:
        id: Its number in the log.
        request: The engine's id for it.
        at: When it was first scheduled, in Unix seconds.
        waited_s: Seconds from its arrival until then; 0 if the engine does not report it.
        wait: What it waited for; None if it hardly waited.
        prompt_tokens: Tokens of the prompt, including a partial block at the end.
        block_size: Tokens per block.
        again: How many of the computed blocks had been in this pool before.
        finished: Why it ended; ``end_not_heard`` if no end was reported, or not yet; None while it
            runs.
        is_awaited: Whether its end may still be reported: it runs, or its engine lost messages less
            than ten minutes ago. Otherwise the request no longer changes.
        ended_at: When it ended, in Unix seconds; None while it runs, or if no end was reported.
        answer_tokens: Tokens of its answer; None while it runs.
        expected_pause_s: The pause after it that its session announced, in seconds.
        prompt_s: Seconds that its prompt took to compute, at the prefill rate that its engine
            measured; None while it runs, or without such a rate.
        miss: Why no more was found; ``not_cacheable`` if nothing is missing that could be found.
        remedies: What would have made it faster, the largest saving first.
    """

    id: int
    request: str
    engine: str
    session: str | None
    tenant: str | None
    at: float
    waited_s: float = 0.0
    wait: Wait | None = None
    prompt_tokens: int
    block_size: int
    blocks: BlockCounts
    again: int = 0
    finished: str | None
    is_awaited: bool = False
    ended_at: float | None
    answer_tokens: int | None = None
    expected_pause_s: float | None
    prompt_s: float | None = None
    miss: Miss | None
    remedies: tuple[Remedy, ...] = ()

    @property
    def arrived(self) -> float:
        """Time of its arrival at its engine, in Unix seconds; a pause before it lasts until
        then.
        """
        return self.at - self.waited_s


class RequestQuery(NamedTuple):
    limit: int
    before: int | None = None  # only requests that began before this one
    session: str | None = None
    search: str = ""  # only requests whose id, session or tenant contains this
    reason: str | None = None  # only requests that missed for this reason
    is_slowest: bool = False  # whether the longest-running come first, not the newest


class Requests(Answer):
    """Recent requests, the newest first.

    Attributes:
        next: Pass it as ``before`` to get the next page; None on the last one.
        since: When the oldest remembered request began; None if unknown.
    """

    requests: list[RequestView]
    next: int | None
    since: float | None


class ReasonTotal(Part):
    """One reason since the sidecar's start: its requests, and the blocks that they computed for
    it.
    """

    requests: int
    blocks: int


class Loss(Part):
    """Blocks that were computed again, by the session that needed them.

    Attributes:
        multi_turn: Needed by the session itself: its next turn found less than its last one left.
        cross_session: Shared blocks, computed before by another session.
        capacity_multi_turn: The pool size, in blocks, that would have kept nearly all of the
            former, by their reuse distances; None if none were lost.
    """

    multi_turn: int
    cross_session: int
    capacity_multi_turn: int | None
    capacity_cross_session: int | None


class Misses(Answer):
    """Misses by reason: totals, and over time in steps, the oldest first.

    Attributes:
        reasons: Every reason code, in the order in which to show them, with its meaning.
        requests: By reason: number of requests in each step.
        blocks: By reason: number of blocks that they computed in each step.
        asked, found: Prompt tokens in each step, and how many of them were found.
        asked_blocks: Full prompt blocks in each step, in the block size of each engine.
        evicted: Blocks that left a pool in each step.
        wanted: Blocks requested again in each step, within ten minutes after their eviction.
    """

    reasons: dict[str, str]
    totals: dict[str, ReasonTotal]
    step_s: float
    starts: list[float]
    requests: dict[str, list[int]]
    blocks: dict[str, list[int]]
    asked: list[int]
    asked_blocks: list[int]
    found: list[int]
    evicted: list[int]
    wanted: list[int]
    loss: Loss


def add_routes(paths: APIRouter, page: Page) -> None:
    @paths.get("/requests", response_model=Requests)
    def requests(
        limit: RecordsQuery = 100,
        before: NumberQuery = None,
        session: NameQuery = None,
        search: NameQuery = None,
        reason: ReasonQuery = None,
        order: Literal["newest", "slowest"] = "newest",
    ) -> Response:
        query = RequestQuery(limit, before, session, search or "", reason, order == "slowest")
        return answered(requests_of(page, query))

    @paths.get("/misses", response_model=Misses)
    def misses() -> Response:
        return answered(misses_of(page))


_LEAST_SHARE: Final = 0.01  # a smaller share of a request's time is not mentioned; chosen
_MOSTLY: Final = 0.5  # share of a request's time from which a long answer is mentioned; chosen
_ANSWER: Final = (
    "A shorter answer, or fewer requests beside it: most of its time went to its answer, and no "
    "cache shortens that."
)


def remedies(history: History, number: int, wait: Remedy | None) -> tuple[Remedy, ...]:
    """Return what would have made a request faster, the largest saving first."""
    record = history.requests.record(number)
    ran, prompt_s = float(record["ran"]), prompt_seconds(history, number)
    all_s = float(record["waited"]) + max(0.0, ran) if ran == ran else None
    found = [(wait.saves_s or 0.0, wait)] if wait is not None else []
    if (prompt := _prompt_remedy(history, number, prompt_s)) is not None:
        found.append((prompt.saves_s or 0.0, prompt))
    if all_s is not None and prompt_s is not None and (rest := ran - prompt_s) > _MOSTLY * all_s:
        found.append((rest, Remedy(of="answer", saves_s=None, text=_ANSWER)))
    return _worthwhile([each for _, each in sorted(found, key=lambda f: -f[0])], all_s)


def prompt_seconds(history: History, number: int) -> float | None:
    """Return the seconds that a request's prompt took to compute; None if the rate is unknown."""
    record = history.requests.record(number)
    rate = history.reports(history.requests.names(number).engine).prefill_tokens_per_s
    if not rate or not float(record["ran"]) >= 0:  # NaN: it runs
        return None
    return min(float(record["ran"]), _computed_tokens(history, number) / rate)


def _computed_tokens(history: History, number: int) -> int:
    """Tokens of its prompt that were computed, including its partial block."""
    record = history.requests.record(number)
    found = sum(int(record[name]) for name in ("pool", "loaded", "prefetched", "spliced"))
    return int(record["tokens"]) - found * int(record["size"])


def _prompt_remedy(history: History, number: int, prompt_s: float | None) -> Remedy | None:
    """What would have let the prompt find more, and the seconds that could have saved at most."""
    record, names = history.requests.record(number), history.requests.names(number)
    reason, detail = Reason(int(record["reason"])), int(record["detail"])
    pool, was_there = history.pool_blocks(names.engine), record["ago"] < record["waited"]
    missing = FirstMiss(
        reason, detail, int(record["index"]), int(record["short"]), pool, bool(was_there),
        history.reports(names.engine).copy_room,
    )  # fmt: skip
    text = miss_remedy(missing)
    if text is None:
        return None
    saves_s = prompt_s if could_find_more(reason, detail) else 0.0
    computed = _computed_tokens(history, number)
    if saves_s and record["again"] and computed:
        saves_s *= min(1.0, int(record["again"]) * int(record["size"]) / computed)
    return Remedy(of="prompt", saves_s=saves_s, text=text)


def _worthwhile(found: list[Remedy], all_s: float | None) -> tuple[Remedy, ...]:
    """Drop remedies that save next to nothing, unless there are no others."""
    least = _LEAST_SHARE * (all_s or 0.0)
    worth = [each for each in found if each.saves_s is None or each.saves_s > least]
    return tuple(worth or found)


# What an engine computed while a request waited for its turn.

_LEAST_WAIT_S: Final = 0.05  # a shorter wait is not mentioned; chosen


def wait_of(history: History, number: int) -> tuple[Wait, Remedy] | tuple[None, None]:
    log = history.requests
    waited = float(log.record(number)["waited"])
    if waited < _LEAST_WAIT_S:
        return None, None
    hold, begun, running = log.hold(number), log.ahead(number), log.under_way(number)
    ahead = begun if len(begun) else running[-1:]
    records = log.records(ahead)
    size = records["size"].astype(np.int64)
    found = sum(records[name] * size for name in ("pool", "loaded", "prefetched", "spliced"))
    computed = records["tokens"] - found
    tokens = int(computed.sum())
    most = int(computed.argmax()) if tokens else None
    largest = None if most is None else int(ahead[most])
    again, engine = records["again"] > 0, log.names(number).engine
    work = WorkAhead(
        queued_s=waited if hold is None else max(0.0, waited - hold.seconds),
        running=len(running),
        freed_s=_freed_after(log, number, running),
        runner=_owner_of(log, int(running[-1])) if len(running) else None,
        prompts=len(begun),
        tokens=tokens,
        again=int((records["again"] * size).sum()),
        short=int(records["short"][again].max(initial=0)),
        pool=history.pool_blocks(engine),
        copies=history.reports(engine).copy_room,
        rate=history.reports(engine).prefill_tokens_per_s,
        who=None if largest is None else _owner_of(log, largest),
        most=0 if most is None else int(computed[most]),
    )
    text, saves_s = wait_remedy(work, hold)
    return _wait_view(work, hold, largest), Remedy(of="wait", saves_s=saves_s, text=text)


def _wait_view(work: WorkAhead, hold: Hold | None, largest: int | None) -> Wait:
    return Wait(
        prompts=work.prompts,
        tokens=work.tokens,
        again=work.again,
        largest=largest,
        held_s=0.0 if hold is None else round(hold.seconds, 3),
        until=None if hold is None else hold.reason,
        sentence=wait_sentence(work, hold).rstrip(),
    )


def _freed_after(log: RequestLog, number: int, running: npt.NDArray[np.int64]) -> float | None:
    """Seconds from a request's arrival until one that ran ended; None: none did in time."""
    record, ran = log.record(number), log.records(running)
    ends = ran["at"] + ran["ran"]
    in_time = ends[ends <= record["at"]]  # NaN: it runs
    if not len(in_time):
        return None
    return max(0.0, float(in_time.min() - record["at"]) + float(record["waited"]))


def _owner_of(log: RequestLog, number: int) -> str:
    names = log.names(number)
    return names.session or names.request


# Requests, each with its first miss.


@recent
def requests_of(page: Page, query: RequestQuery) -> Requests:
    with page.questions.turn():
        history, now = page.graph.tables.history, page.graph.clock()
        found = list(_request_views(history, query, now, page.unix))
        more = len(found) == query.limit and found[-1].id > history.requests.first
        following = found[-1].id if more and not query.is_slowest else None
        since = page.unix(history.requests.oldest) if history.requests.next else None
    return Requests(at=page.unix.now(), requests=found, next=following, since=since)


def _request_views(
    history: History, query: RequestQuery, now: float, unix: Unix
) -> Iterator[RequestView]:
    log = history.requests
    newest = log.next if query.before is None else min(query.before, log.next)
    in_order = range(newest - 1, log.first - 1, -1)
    numbers = log.slowest(now).tolist() if query.is_slowest else in_order
    wanted = (number for number in numbers if number < newest and _fits(log, number, query))
    for number in islice(wanted, query.limit):
        yield request_view(history, number, unix)


def session_requests(
    history: History, session: str, tenant: str | None, unix: Unix
) -> Iterator[RequestView]:
    """One session's requests, the newest first; another tenant's may have the same name."""
    log = history.requests
    for number in range(log.next - 1, log.first - 1, -1):
        names = log.names(number)
        if names.session == session and names.tenant == tenant:
            yield request_view(history, number, unix)


def _fits(log: RequestLog, number: int, query: RequestQuery) -> bool:
    names, search = log.names(number), query.search.lower()
    if query.session not in (None, names.session):
        return False
    if query.reason not in (None, REASON_NAMES[log.record(number)["reason"]]):
        return False
    said = names.request, names.session or "", names.tenant or ""
    return not search or any(search in each.lower() for each in said)


def request_view(history: History, number: int, unix: Unix) -> RequestView:
    record, names = history.requests.record(number), history.requests.names(number)
    asked, pool, loaded, prefetched, spliced = (
        int(record[name]) for name in ("asked", "pool", "loaded", "prefetched", "spliced")
    )
    ran = float(record["ran"]) if record["ran"] >= 0 else None  # NaN: it runs
    wait, remedy = wait_of(history, number)
    return RequestView(
        id=number,
        request=names.request,
        engine=names.engine,
        session=names.session,
        tenant=names.tenant,
        at=unix(float(record["at"])),
        waited_s=round(float(record["waited"]), 3),
        wait=wait,
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
        expected_pause_s=_or_none(float(record["pause"])),
        prompt_s=prompt_seconds(history, number),
        miss=_miss(history, number, unix),
        remedies=remedies(history, number, remedy),
    )


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value


def _miss(history: History, number: int, unix: Unix) -> Miss:
    record, names = history.requests.record(number), history.requests.names(number)
    reason, index = Reason(int(record["reason"])), int(record["index"])
    detail, eviction = int(record["detail"]), int(record["eviction"])
    left = Departure(
        _or_none(float(record["ago"])), float(record["waited"]), _score(history, number)
    )
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
    """The missing block's score when it was evicted, in words; None once that is forgotten."""
    eviction = int(history.requests.record(number)["eviction"])
    log = history.evictions_of(history.requests.names(number).engine)
    if log is None or not log.first <= eviction < log.next:
        return None
    return scored(log.terms.of(eviction))


_MOST: Final = 0.95  # share of the lost blocks that the stated capacity would have kept; chosen


@recent
def misses_of(page: Page) -> Misses:
    with page.questions.turn():
        tables, now = page.graph.tables, page.graph.clock()
        history = tables.history
        starts, sums = history.reasons.series(now)
        count = len(REASON_NAMES)
        columns = sums.T.tolist() if len(sums) else [[] for _ in range(2 * count)]
        totals = history.totals
        return Misses(
            at=page.unix(now),
            reasons=REASON_TEXTS,
            totals={
                name: ReasonTotal(requests=totals[at], blocks=totals[count + at])
                for at, name in enumerate(REASON_NAMES)
            },
            step_s=history.reasons.step_s,
            starts=[page.unix(start) for start in starts],
            requests=dict(zip(REASON_NAMES, columns[:count], strict=True)),
            blocks=dict(zip(REASON_NAMES, columns[count:], strict=True)),
            **_minutes(history, starts, now),
            loss=_loss(history, sum(tables.pool_blocks.values())),
        )


def _minutes(history: History, starts: list[float], now: float) -> dict[str, list[int]]:
    """Per-minute counts for the same steps; zeros where nothing was counted."""
    known, sums = history.minutes.series(now)
    rows = dict(zip(known, sums.tolist(), strict=True))
    none = [0] * len(MINUTE_COLUMNS)
    columns = zip(*(rows.get(start, none) for start in starts), strict=True)
    lists = [list(column) for column in columns] or [[] for _ in MINUTE_COLUMNS]
    return dict(zip(MINUTE_COLUMNS, lists, strict=True))


def _loss(history: History, pools: int) -> Loss:
    multi, cross = history.lost.tolist()
    capacities = [_capacity(buckets, pools) for buckets in history.beyond.tolist()]
    return Loss(
        multi_turn=multi,
        cross_session=cross,
        capacity_multi_turn=capacities[0],
        capacity_cross_session=capacities[1],
    )


def _capacity(buckets: list[int], pools: int) -> int | None:
    """The pool size, in blocks, that would have kept most of what was lost."""
    total, so_far = sum(buckets), 0
    for power, count in enumerate(buckets):
        so_far += count
        if total and so_far >= _MOST * total:
            return int(pools + (1 << power))
    return None
