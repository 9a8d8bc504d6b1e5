"""What all views share: the parts of a sidecar that they read, and the encoding of answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from threading import Lock
from typing import TYPE_CHECKING, Annotated, Concatenate, Final, ParamSpec, TypeVar

import orjson
from cachetools import FIFOCache, cached
from fastapi import Path, Query
from fastapi.responses import Response
from pydantic import BaseModel
from starlette.convertors import Convertor, register_url_convertor

from ...graph.errors import GraphError

if TYPE_CHECKING:
    from ...dashboards.source import SidecarStatus
    from ...graph.kvcache_graph import KVCacheGraph
    from ...graph.tables.tables import Tables
    from ...graph.wire.advice import AdmissionAdvice, EvictionRanking
    from ..config.edits import ConfigWatch
    from ..shadows.runner import ShadowRunner
    from ..words.times import UnixTime
    from .questions import QueryGate, RecentAnswers

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
    """Compute an answer at most twice a second, however many clients ask (see
    ``RecentAnswers``).
    """

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


@cached(FIFOCache(_WRITTEN), key=id, lock=Lock())
def _written(model: BaseModel) -> tuple[BaseModel, bytes]:
    """An answer's JSON, written once however many ask; its model is kept, so that no other gets its
    id.
    """
    return model, orjson.dumps(model.model_dump())


def answered(model: BaseModel) -> Response:
    """Return a model as JSON, without validating it again."""
    return Response(_written(model)[1], headers=HEADERS, media_type="application/json")
