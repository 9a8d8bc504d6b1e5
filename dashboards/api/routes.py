"""The paths below ``/v1``, their parameters, and the models that they answer with."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Annotated, Final, Literal

import orjson
from fastapi import APIRouter, Depends, Header, Path, Query
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel

from ...graph.logs.reasons import REASON_NAMES
from ..answers.answer import parse_key
from ..answers.caches import MOST_STEPS, CacheNoted, Caches, CacheSteps
from ..answers.engine_views import Engines
from ..answers.evictions import Evictions, EvictionsAsked, RankingView
from ..answers.graph_view import BlockView, GraphView
from ..answers.misses import Misses, Requests, RequestsAsked
from ..answers.now import Now
from ..answers.sampled import Sampled
from ..answers.session_views import Sessions, SessionTimeline
from ..answers.what_if import Shadows, WeightChange, WeightEffect, Weights
from ..intents.intent_wishes import IntentReplies, IntentWishes
from .page_source import PageSource
from .stream import NewsStream

MAX_RECORDS: Final = 1_000  # in one answer; chosen
MAX_NODES: Final = 200_000  # chosen: what the page promises to be usable at

KeyParam = Annotated[str, Path(max_length=24)]
NameParam = Annotated[str, Path(max_length=256)]
NameQuery = Annotated[str | None, Query(max_length=256)]
RecordsQuery = Annotated[int, Query(ge=1, le=MAX_RECORDS)]
MarkQuery = Annotated[str, Query(max_length=64)]
ReasonQuery = Annotated[str | None, Query(pattern=f"^({'|'.join(REASON_NAMES)})$")]
NodesQuery = Annotated[int, Query(ge=1, le=MAX_NODES)]
StepsQuery = Annotated[int, Query(ge=1, le=MOST_STEPS)]
NumberQuery = Annotated[int | None, Query(ge=0, lt=1 << 53)]
_WRITTEN: Final = 32  # answers whose JSON is kept
_HEADERS: Final = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}


def page_router(
    page: Callable[[], PageSource], guard: Callable[..., None], edits: Callable[..., None]
) -> APIRouter:
    """All of ``/v1``.

    Args:
        page: Gives the source at the first question.
        guard: A dependency that refuses whoever may not read names.
        edits: One that refuses whoever may not change anything.
    """
    router = APIRouter(prefix="/v1", dependencies=[Depends(guard)])
    _add_logs(router, page)
    _add_graph(router, page)
    _add_sidecar(router, page)
    _add_changes(router, page, edits)
    _add_stream(router, page)
    return router


def _add_logs(router: APIRouter, page: Callable[[], PageSource]) -> None:
    @router.get("/now", response_model=Now)
    def now() -> Response:
        return answered(page().now())

    @router.get("/requests", response_model=Requests)
    def requests(
        limit: RecordsQuery = 100,
        before: NumberQuery = None,
        session: NameQuery = None,
        search: NameQuery = None,
        reason: ReasonQuery = None,
        order: Literal["newest", "slowest"] = "newest",
    ) -> Response:
        is_slowest = order == "slowest"
        return answered(
            page().requests(RequestsAsked(limit, before, session, search or "", reason, is_slowest))
        )

    @router.get("/misses", response_model=Misses)
    def misses() -> Response:
        return answered(page().misses())

    @router.get("/evictions", response_model=Evictions)
    def evictions(
        engine: NameQuery = None,
        limit: RecordsQuery = 100,
        before: NumberQuery = None,
        after: MarkQuery = "",
    ) -> Response:
        return answered(page().evictions(EvictionsAsked(limit, engine, before, after)))

    @router.get("/ranking", response_model=RankingView)
    def ranking(engine: NameQuery = None, limit: RecordsQuery = 100) -> Response:
        return answered(page().ranking(engine, limit))


def _add_graph(router: APIRouter, page: Callable[[], PageSource]) -> None:
    @router.get("/graph", response_model=GraphView)
    def graph(
        limit: NodesQuery = 20_000,
        session: NameQuery = None,
        if_none_match: Annotated[str | None, Header(max_length=64)] = None,
    ) -> Response:
        tag = f'"{page().graph_version()}"'
        if if_none_match == tag:
            return Response(status_code=304, headers={"ETag": tag})
        found = page().graph(limit, session)
        answer = answered(found)
        answer.headers["ETag"] = f'"{found.version}"'
        return answer

    @router.get("/blocks/{key}", response_model=BlockView)
    def block(key: KeyParam) -> Response:
        return answered(page().block(parse_key(key)))

    @router.get("/sessions", response_model=Sessions)
    def sessions(limit: RecordsQuery = 200, search: NameQuery = None) -> Response:
        return answered(page().sessions(limit, search or ""))

    @router.get("/sessions/{name:anything}", response_model=SessionTimeline)
    def session(name: NameParam, tenant: NameQuery = None, after: MarkQuery = "") -> Response:
        return answered(page().session(name, tenant, after))


def _add_sidecar(router: APIRouter, page: Callable[[], PageSource]) -> None:
    @router.get("/engines", response_model=Engines)
    def engines() -> Response:
        return answered(page().engines())

    @router.get("/shadows", response_model=Shadows)
    def shadows(engine: NameQuery = None) -> Response:
        return answered(page().shadows(engine))

    @router.get("/sampled", response_model=Sampled)
    def sampled(limit: RecordsQuery = 50, session: NameQuery = None) -> Response:
        return answered(page().sampled(limit, session))

    @router.get("/caches", response_model=Caches)
    def caches(steps: StepsQuery = 600) -> Response:
        return answered(page().caches(steps))

    @router.get("/weights", response_model=Weights)
    def weights() -> Response:
        return answered(page().weights())


def _add_changes(
    router: APIRouter, page: Callable[[], PageSource], edits: Callable[..., None]
) -> None:
    @router.post("/weights/preview", response_model=WeightEffect)
    def preview(change: WeightChange, engine: NameQuery = None) -> Response:
        return answered(page().preview(change, engine))

    @router.post("/weights/trial", response_model=Shadows, dependencies=[Depends(edits)])
    def try_weights(change: WeightChange) -> Response:
        return answered(page().try_weights(change))

    @router.delete("/weights/trial", response_model=Shadows, dependencies=[Depends(edits)])
    def end_trial() -> Response:
        return answered(page().end_trial())

    @router.put("/weights", response_model=Weights, dependencies=[Depends(edits)])
    def change_weights(change: WeightChange) -> Response:
        return answered(page().change_weights(change))

    @router.post("/intents", response_model=IntentReplies, dependencies=[Depends(edits)])
    def intend(wishes: IntentWishes) -> Response:
        return answered(page().intend(wishes))

    @router.post("/caches", response_model=CacheNoted, dependencies=[Depends(edits)])
    def note_steps(told: CacheSteps) -> Response:
        return answered(page().note_steps(told))

    @router.post("/weights/undo", response_model=Weights, dependencies=[Depends(edits)])
    def undo_weights() -> Response:
        return answered(page().undo_weights())


def _add_stream(router: APIRouter, page: Callable[[], PageSource]) -> None:
    news = NewsStream(page)

    @router.get("/events")
    async def events(last_event_id: Annotated[str, Header(max_length=64)] = "") -> Response:
        """Server-sent events; see ``stream``."""
        return StreamingResponse(
            news.follow(last_event_id), headers=_HEADERS, media_type="text/event-stream"
        )


class _Written:
    """The last answers as JSON: the same object is written once, however many ask for it."""

    def __init__(self) -> None:
        self._bodies: OrderedDict[int, tuple[BaseModel, bytes]] = OrderedDict()

    def body(self, model: BaseModel) -> bytes:
        """What ``model`` is as JSON."""
        known = self._bodies.get(id(model))
        if known is not None and known[0] is model:
            return known[1]
        body = orjson.dumps(model.model_dump())
        self._bodies[id(model)] = model, body
        while len(self._bodies) > _WRITTEN:
            self._bodies.popitem(last=False)
        return body


_written: Final = _Written()


def answered(model: BaseModel) -> Response:
    """A model as JSON; what is there was checked where it was made."""
    return Response(_written.body(model), headers=_HEADERS, media_type="application/json")
