"""Events of Chrome's trace format, which Perfetto and chrome://tracing open.

The format: docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

_US: Final = 1e6  # the format's times are in microseconds


class TraceFile:
    """Makes events whose times count from ``begin``."""

    def __init__(self, begin: float) -> None:
        self._begin = begin

    def process(self, pid: int, name: str) -> Iterator[dict[str, Any]]:
        """Name a group of tracks; groups stand in the order of their numbers."""
        yield _named("process_name", pid, 0, name=name)
        yield _named("process_sort_index", pid, 0, sort_index=pid)

    def thread(self, pid: int, tid: int, name: str) -> Iterator[dict[str, Any]]:
        """Name a track; tracks stand in the order of their numbers."""
        yield _named("thread_name", pid, tid, name=name)
        yield _named("thread_sort_index", pid, tid, sort_index=tid)

    def span(
        self, place: tuple[int, int], name: str, times: tuple[float, float], args: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Something that lasts; spans of one track must not overlap without nesting."""
        begin, end = self._us(times[0]), self._us(times[1])
        return {**_at("X", place, name, begin), "dur": max(0, end - begin), "args": dict(args)}

    def instant(
        self, place: tuple[int, int], name: str, at: float, args: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Something that happens at once, shown on its track."""
        return {**_at("i", place, name, self._us(at)), "s": "t", "args": dict(args)}

    def counter(
        self, pid: int, name: str, at: float, values: Mapping[str, float]
    ) -> dict[str, Any]:
        """Numbers over time; those of one name are stacked."""
        return {**_at("C", (pid, 0), name, self._us(at)), "args": dict(values)}

    def overlapping(
        self, pid: int, number: int, name: str, times: tuple[float, float], args: Mapping[str, Any]
    ) -> Iterator[dict[str, Any]]:
        """Something that lasts, and may overlap others of its name in any way."""
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
    """For each span, in order of their beginnings, the first lane where nothing runs by then."""
    free_at: list[float] = []
    chosen = []
    for begin, end in spans:
        lane = next((n for n, free in enumerate(free_at) if free <= begin), len(free_at))
        free_at[lane:] = [end, *free_at[lane + 1 :]]
        chosen.append(lane)
    return chosen
