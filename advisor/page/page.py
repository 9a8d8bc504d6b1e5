"""What all views share: the parts of a sidecar that they read, how people ask about the graph
without delaying the sidecar's own work, and how an answer is sent.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Concatenate,
    Final,
    NoReturn,
    ParamSpec,
    TypeVar,
    cast,
)

import orjson
from cachetools import FIFOCache, cached
from fastapi import Path, Query
from fastapi.responses import Response
from pydantic import BaseModel
from starlette.convertors import Convertor, register_url_convertor

from ...dashboards.source import BusyError
from ...graph.errors import GraphError

if TYPE_CHECKING:
    from ...dashboards.source import SidecarStatus
    from ...graph.kvcache_graph import KVCacheGraph
    from ...graph.tables.tables import Tables
    from ...graph.wire.advice import AdmissionAdvice, EvictionRanking
    from ..config.edits import ConfigWatch
    from ..shadows.runner import ShadowRunner
    from ..words.times import UnixTime

MAX_RECORDS: Final = 1_000  # in one answer; chosen

NameParam = Annotated[str, Path(max_length=256)]
NameQuery = Annotated[str | None, Query(max_length=256)]
RecordsQuery = Annotated[int, Query(ge=1, le=MAX_RECORDS)]
MarkQuery = Annotated[str, Query(max_length=64)]
NumberQuery = Annotated[int | None, Query(ge=0, lt=1 << 53)]

HEADERS: Final = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}
_WRITTEN: Final = 32  # answers whose JSON is cached

_P = ParamSpec("_P")
_T = TypeVar("_T")


class _Anything(Convertor[str]):
    """A path parameter of any characters: a session's name may hold slashes and line ends."""

    regex = r"[\s\S]+"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("anything", _Anything())


@dataclass(frozen=True, slots=True)
class Page:
    """The data that the views read, from any thread."""

    graph: KVCacheGraph  # read under its lock, one question at a time
    questions: QueryGate  # gives each query its turn at the lock
    recent: RecentAnswers  # see the function `recent`
    status: Callable[[], SidecarStatus | None]  # returns None for a graph without a sidecar
    latest: Callable[[], Mapping[str, EvictionRanking]]  # by engine
    admissions: Callable[[], Mapping[str, AdmissionAdvice]]  # by engine
    shadows: ShadowRunner
    watch: ConfigWatch
    intended: Callable[[], None]  # called without the lock after an intent or a signal was applied
    unix: UnixTime


def recent(answer: Callable[Concatenate[Page, _P], _T]) -> Callable[Concatenate[Page, _P], _T]:
    """Compute an answer at most twice a second for all clients; see ``RecentAnswers``."""

    @wraps(answer)
    def of(page: Page, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        question = answer, args, tuple(kwargs.items())
        return page.recent.of(question, lambda: answer(page, *args, **kwargs))

    return of


def chosen_engine(tables: Tables, engine: str | None) -> str | None:
    """Return the requested engine, or the first one if none is named; None if there is none."""
    if engine is None:
        return next(iter(tables.engines), None)
    if engine not in tables.engines:
        raise GraphError("no engine of that id is connected")
    return engine


@cached(FIFOCache(_WRITTEN), key=id, lock=threading.Lock())
def _written(model: BaseModel) -> tuple[BaseModel, bytes]:
    """An answer's JSON, written once; its model is kept so that no other gets its id."""
    return model, orjson.dumps(model.model_dump())


def answered(model: BaseModel) -> Response:
    """Return a model as JSON, without validating it again."""
    return Response(_written(model)[1], headers=HEADERS, media_type="application/json")


WAITING: Final = 4  # questions that may wait; more are refused at once; chosen
PATIENCE_S: Final = 0.5  # the longest that a question waits; chosen
REST: Final = 3.0  # rest after a question, as a multiple of the time it took; chosen

FRESH_S: Final = 0.5  # an older answer is worked out again; chosen
STALE_S: Final = 2.0  # an older answer is never given; chosen
_KEPT: Final = 64  # answers
_MANY_ASK: Final = "many questions are being asked"
_SOON_S: Final = 1


class QueryGate:
    """Allows one query of the graph at a time, and leaves time between two.

    The graph's lock is not fair: threads that query without a pause would keep it to themselves
    while batches wait to be applied and rankings become outdated. ``worked`` returns CPU seconds of
    the calling thread, so that a busy machine does not count as a slow query.
    """

    def __init__(
        self,
        lock: AbstractContextManager[object],
        clock: Callable[[], float],
        sleep: Callable[[float], None] = time.sleep,
        worked: Callable[[], float] = time.thread_time,
    ) -> None:
        self._lock = lock
        self._clock = clock
        self._sleep = sleep
        self._worked = worked
        self._room = threading.BoundedSemaphore(WAITING)
        self._turn = threading.Lock()
        self._free_at = clock()
        self.refused = 0

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Hold the graph's lock for one query; raises BusyError."""
        if not self._room.acquire(blocking=False):
            self._refuse(_MANY_ASK)
        try:
            self._wait()
            try:
                with self._lock:
                    begun = self._worked()
                    try:
                        yield
                    finally:
                        self._free_at = self._clock() + REST * (self._worked() - begun)
            finally:
                self._turn.release()
        finally:
            self._room.release()

    def _wait(self) -> None:
        deadline = self._clock() + PATIENCE_S
        if not self._turn.acquire(timeout=PATIENCE_S):
            self._refuse(_MANY_ASK)
        rest = self._free_at - self._clock()
        if rest > max(0.0, deadline - self._clock()):
            self._turn.release()
            self._refuse("the last question took long", math.ceil(rest))
        if rest > 0:
            self._sleep(rest)

    def _refuse(self, why: str, again_in_s: int = _SOON_S) -> NoReturn:
        self.refused += 1
        raise BusyError(why, again_in_s)


class RecentAnswers:
    """Caches answers by query, each for ``FRESH_S``; thread-safe. While one thread computes a new
    answer, or the graph is busy, others get the previous one, up to ``STALE_S`` old.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._answers: OrderedDict[Hashable, tuple[float, Any]] = OrderedDict()
        self._asked: set[Hashable] = set()

    def of(self, question: Hashable, answer: Callable[[], _T]) -> _T:
        """Return a recent answer, or else a new one; raises BusyError."""
        age, kept = self._kept(question)
        if age < FRESH_S or (age < STALE_S and question in self._asked):
            return cast(_T, kept)
        self._asked.add(question)
        try:
            return self._new(question, answer)
        except BusyError:
            if age >= STALE_S:
                raise
            return cast(_T, kept)
        finally:
            self._asked.discard(question)

    def _kept(self, question: Hashable) -> tuple[float, Any]:
        """The last answer and its age in seconds; infinite if there is none."""
        known = self._answers.get(question)
        return (math.inf, None) if known is None else (self._clock() - known[0], known[1])

    def _new(self, question: Hashable, answer: Callable[[], _T]) -> _T:
        fresh = answer()
        self._answers[question] = self._clock(), fresh
        while len(self._answers) > _KEPT:
            self._answers.popitem(last=False)
        return fresh
