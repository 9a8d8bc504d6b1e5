"""Writes sessions and engines over time as a trace for Perfetto (ui.perfetto.dev)."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any, Final

from ..page.evictions import EvictionView
from ..page.misses import RequestView
from .activity import Activity, BlockLife

_US: Final = 1e6  # the format's times are in microseconds


class TraceFile:
    """Makes events of Chrome's trace format, with times relative to ``begin``.

    Perfetto and chrome://tracing read it. The format:
    docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
    """

    def __init__(self, begin: float) -> None:
        self._begin = begin

    # Groups of tracks, and tracks, are sorted by number.

    def process(self, pid: int, name: str) -> Iterator[dict[str, Any]]:
        yield _named("process_name", pid, 0, name=name)
        yield _named("process_sort_index", pid, 0, sort_index=pid)

    def thread(self, pid: int, tid: int, name: str) -> Iterator[dict[str, Any]]:
        yield _named("thread_name", pid, tid, name=name)
        yield _named("thread_sort_index", pid, tid, sort_index=tid)

    def span(
        self, place: tuple[int, int], name: str, times: tuple[float, float], args: Mapping[str, Any]
    ) -> dict[str, Any]:
        """An event with a duration; spans of one track may nest but not overlap."""
        begin, end = self._us(times[0]), self._us(times[1])
        return {**_at("X", place, name, begin), "dur": max(0, end - begin), "args": dict(args)}

    def instant(
        self, place: tuple[int, int], name: str, at: float, args: Mapping[str, Any]
    ) -> dict[str, Any]:
        """An event without a duration, shown on its track."""
        return {**_at("i", place, name, self._us(at)), "s": "t", "args": dict(args)}

    def counter(
        self, pid: int, name: str, at: float, values: Mapping[str, float]
    ) -> dict[str, Any]:
        """Values over time; those with one name are stacked."""
        return {**_at("C", (pid, 0), name, self._us(at)), "args": dict(values)}

    def overlapping(
        self, pid: int, number: int, name: str, times: tuple[float, float], args: Mapping[str, Any]
    ) -> Iterator[dict[str, Any]]:
        """An event with a duration, which may overlap others of its name."""
        for phase, at in zip("be", times, strict=True):
            event = _at(phase, (pid, 0), name, self._us(at))
            yield {**event, "cat": "block", "id": f"{pid << 32 | number:#x}", "args": dict(args)}

    def _us(self, at: float) -> int:
        return max(0, round((at - self._begin) * _US))


def _at(phase: str, place: tuple[int, int], name: str, ts: int) -> dict[str, Any]:
    return {"ph": phase, "pid": place[0], "tid": place[1], "name": name, "cat": "kvgraph", "ts": ts}


def _named(kind: str, pid: int, tid: int, **args: object) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": args}


def lanes(spans: Iterable[tuple[float, float]]) -> list[int]:
    """For each span, in order of begin, the first lane that is free."""
    free_at: list[float] = []
    chosen = []
    for begin, end in spans:
        lane = next((n for n, free in enumerate(free_at) if free <= begin), len(free_at))
        free_at[lane:] = [end, *free_at[lane + 1 :]]
        chosen.append(lane)
    return chosen


_SESSIONS: Final = 1  # the number of the group of tracks; engines follow
_EVICTIONS: Final = 1  # the number of an engine's track
_KEYS_TOLD: Final = 16  # of blocks that left together; chosen
_STEP_S: Final = 10.0  # of the counters of tokens; chosen, as in the page's history
_FOUND: Final = ("pool", "loaded", "prefetched", "spliced", "computed")


def perfetto(activity: Activity, most_blocks: int) -> dict[str, Any]:
    """A trace as JSON: a track per session, each engine's pool, evictions, and last block stays."""
    return {
        "traceEvents": list(_events(activity, most_blocks)),
        "displayTimeUnit": "ms",
        "otherData": {
            "from": activity.name,
            "begins": _date(activity),
            "unknown": " ".join(activity.unknown),
        },
    }


def _events(activity: Activity, most_blocks: int) -> Iterator[dict[str, Any]]:
    lives = activity.lives[max(0, len(activity.lives) - most_blocks) :]
    file = TraceFile(min((activity.begin, *(each.begin for each in lives))))
    yield from _sessions(file, activity)
    ids = {each.engine for each in activity.requests} | {each.engine for each in lives}
    for pid, engine in enumerate(sorted(ids | set(activity.engines)), _SESSIONS + 1):
        name = activity.engines.get(engine, engine)
        yield from file.process(pid, f"engine {name}")
        yield from file.thread(pid, _EVICTIONS, "evictions")
        yield from _tokens(file, pid, [r for r in activity.requests if r.engine == engine])
        yield from _evictions(
            file, pid, [e for e in activity.evictions or () if e.engine == engine]
        )
        for point in activity.pools:
            if point.engine == engine:
                yield file.counter(pid, "blocks in the pool", point.at, {"blocks": point.blocks})
        yield from _lives(file, pid, [e for e in lives if e.engine == engine], activity.end)


def _sessions(file: TraceFile, activity: Activity) -> Iterator[dict[str, Any]]:
    by_session: defaultdict[tuple[str, str], list[RequestView]] = defaultdict(list)
    for request in activity.requests:
        by_session[request.tenant or "", request.session or ""].append(request)
    yield from file.process(_SESSIONS, "sessions")
    tid = 0
    for (tenant, session), requests in by_session.items():
        name = (session or "no session") + (f" of {tenant}" if tenant else "")
        requests.sort(key=lambda each: each.arrived)
        spans = [(each.arrived, _end(each, activity.end)) for each in requests]
        lane_of = lanes(spans)
        for lane in range(max(lane_of) + 1):
            suffix = f" ({lane + 1})" if lane else ""
            yield from file.thread(_SESSIONS, tid + lane + 1, name + suffix)
        for number, (request, lane) in enumerate(zip(requests, lane_of, strict=True), 1):
            yield from _waits(file, tid + lane + 1, request)
            yield _turn(file, tid + lane + 1, number, request, activity.end)
        if session:
            yield from _pauses(file, tid + 1, spans, requests)
        tid += max(lane_of) + 1


def _waits(file: TraceFile, tid: int, request: RequestView) -> Iterator[dict[str, Any]]:
    held_s = min(request.waited_s, 0.0 if request.wait is None else request.wait.held_s)
    queued = request.arrived + held_s
    args = {} if request.wait is None else {"why": request.wait.sentence}
    if held_s > 0:
        yield file.span((_SESSIONS, tid), "held for room", (request.arrived, queued), args)
    if request.at > queued:
        yield file.span((_SESSIONS, tid), "in the queue", (queued, request.at), args)


def _turn(
    file: TraceFile, tid: int, number: int, request: RequestView, end: float
) -> dict[str, Any]:
    blocks, miss = request.blocks, request.miss
    found, said = blocks.asked - blocks.computed, [each.text for each in request.remedies]
    args = {
        "request": request.request,
        "engine": request.engine,
        "waited s": request.waited_s,
        "prompt tokens": request.prompt_tokens,
        **{f"blocks {name}": getattr(blocks, name) for name in ("asked", *_FOUND)},
        "ended": request.finished or "it runs",
        **({} if miss is None else {"reason": miss.reason, "why it missed": miss.sentence}),
        **({"what would help": " ".join(said)} if said else {}),
    }
    name = f"turn {number}: {found} of {blocks.asked} blocks found"
    return file.span((_SESSIONS, tid), name, (request.at, _end(request, end)), args)


def _end(request: RequestView, end: float) -> float:
    return max(request.at, end if request.ended_at is None else request.ended_at)


def _pauses(
    file: TraceFile, tid: int, spans: Sequence[tuple[float, float]], requests: list[RequestView]
) -> Iterator[dict[str, Any]]:
    busy_until = spans[0][1]
    for (_, end), (before, after) in zip(spans[1:], pairwise(requests), strict=True):
        if after.arrived > busy_until:
            paused = round(after.arrived - busy_until, 3)
            args = {"expected s": before.expected_pause_s, "was s": paused}
            yield file.span((_SESSIONS, tid), "pause", (busy_until, after.arrived), args)
        busy_until = max(busy_until, end)


def _tokens(file: TraceFile, pid: int, requests: list[RequestView]) -> Iterator[dict[str, Any]]:
    name = f"prompt tokens per {_STEP_S:.0f} s"
    steps = groupby(requests, key=lambda each: each.at // _STEP_S)
    for step, together in steps:
        sums = Counter[str]()
        for each in together:
            given = {part: getattr(each.blocks, part) * each.block_size for part in _FOUND[:-1]}
            sums.update(given, computed=each.prompt_tokens - sum(given.values()))
        none = dict.fromkeys(_FOUND, 0)
        yield file.counter(pid, name, step * _STEP_S, {**none, **sums})
        yield file.counter(pid, name, (step + 1) * _STEP_S, none)


def _evictions(
    file: TraceFile, pid: int, evictions: Iterable[EvictionView]
) -> Iterator[dict[str, Any]]:
    place = pid, _EVICTIONS
    for (at, rule), left in groupby(evictions, key=lambda each: (each.at, each.rule)):
        together = list(left)
        args = {
            "blocks": len(together),
            "why": together[0].sentence,
            "layers": dict(Counter(each.layer for each in together)),
            "sessions": dict(Counter(each.session or "none" for each in together)),
            "wanted again": sum(each.wanted_after_s is not None for each in together),
            "keys": [each.key for each in together[:_KEYS_TOLD]],
        }
        yield file.instant(place, f"evicted: {rule}", at, args)
        for each in together:
            if each.wanted_after_s is not None:
                again = each.at + each.wanted_after_s
                told = {"key": each.key, "rule": rule, "after s": round(each.wanted_after_s, 1)}
                yield file.instant(place, "wanted again", again, told)


def _lives(
    file: TraceFile, pid: int, lives: Iterable[BlockLife], end: float
) -> Iterator[dict[str, Any]]:
    for number, life in enumerate(lives):
        what = "unused until it left" if life.since_use else "in the pool"
        args = {"key": life.key, "session": life.session, "left": life.why or "it is still there"}
        times = life.begin, max(life.begin, end if life.end is None else life.end)
        yield from file.overlapping(pid, number, f"{life.layer}: {what}", times, args)


def _date(activity: Activity) -> str:
    if not activity.is_live:
        return "with the recording"
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(activity.begin))
