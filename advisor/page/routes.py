"""The paths below ``/v1``, their parameters, and the models that they answer with."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from secrets import token_hex
from typing import Annotated, Final, Literal, Protocol

import orjson
from fastapi import APIRouter, Depends, Header, Path, Query
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool

from ...dashboards.answer import Answer, mark_of, number_in, parse_key
from ...dashboards.source import SidecarStatus
from ...graph.errors import KvGraphError
from ...graph.explain import session_row
from ...graph.intents import Verdict
from ...graph.kvcache_graph import KVCacheGraph
from ...graph.logs.reasons import REASON_NAMES
from ...graph.wire.advice import EvictionRanking
from ..config.config import Config
from ..config.edits import ConfigWatch
from ..shadows.runner import ShadowRunner
from ..words.times import UnixTime
from .caches import MOST_STEPS, CacheNoted, CacheRuns, Caches, CacheSteps
from .engines import Engines, engines_view
from .evictions import Evictions, EvictionsAsked, RankingView, chosen_engine, evictions_view
from .graph import BlockView, GraphView, block_history, graph_view
from .intents import IntentReplies, IntentWishes, intent_replies
from .misses import Misses, Requests, RequestsAsked, RequestView, misses_view, request_views
from .now import Now, TokenHistory, now_view
from .questions import Questions, RecentAnswers
from .sampled import Sampled, sampled_view
from .sessions import Sessions, SessionTimeline, sessions_view, timeline
from .shadows import lru_tokens, shadows_view
from .what_if import (
    Shadows,
    WeightChange,
    WeightDesk,
    WeightEffect,
    Weights,
    ranking_view,
    who_ranks,
)

# ``PageBoard``: what the page asks, over the parts of a running sidecar.


class PageBoard:
    """Implements ``PageSource``. Every method may be called from any thread.

    What many look at is worked out twice a second at most (see ``RecentAnswers``).

    Args:
        graph: Read under its lock, one question at a time.
        questions: Gives each question its turn.
        status: The sidecar's status; None without a sidecar around the graph.
        latest: Rankings by engine.
        shadows: What other policies would find; None makes shadows that do not run.
        watch: The configuration in force; None: the defaults, and no file.
        intended: Called when an intent or a signal was done, without the graph's lock.
        wall: Unix seconds.
    """

    def __init__(
        self,
        graph: KVCacheGraph,
        questions: Questions,
        *,
        status: Callable[[], SidecarStatus | None] = lambda: None,
        latest: Callable[[], Mapping[str, EvictionRanking]] = dict,
        shadows: ShadowRunner | None = None,
        watch: ConfigWatch | None = None,
        intended: Callable[[], None] = lambda: None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._graph = graph
        self._questions = questions
        self._status = status
        self._latest = latest
        self._shadows = shadows or ShadowRunner(graph, graph.clock)
        self._intended = intended
        self._unix = UnixTime(graph.clock, wall)
        self._caches = CacheRuns(wall)
        watch = watch or ConfigWatch(Config(), None, {}, graph.clock)
        self._desk = WeightDesk(graph, questions, self._shadows, watch, self._unix)
        self._recent = RecentAnswers(graph.clock)

    def now(self) -> Now:
        """The first screen."""
        return self._recent.of("now", self._now)

    def _now(self) -> Now:
        status, now = self._status(), self._graph.clock()
        with self._questions.turn():
            lru = lru_tokens(self._shadows, self._graph.tables.history.asked(now), now)
            return now_view(self._graph.tables, status, lru, now, self._unix)

    def requests(self, which: RequestsAsked) -> Requests:
        """Recent requests."""
        return self._recent.of(("requests", which), lambda: self._requests(which))

    def _requests(self, which: RequestsAsked) -> Requests:
        with self._questions.turn():
            history, now = self._graph.tables.history, self._graph.clock()
            found = list(request_views(history, which, now, self._unix))
            more = len(found) == which.limit and found[-1].id > history.requests.first
            following = found[-1].id if more and not which.is_slowest else None
            since = self._unix(history.requests.oldest) if history.requests.next else None
        return Requests(at=self._unix.now(), requests=found, next=following, since=since)

    def misses(self) -> Misses:
        """Totals by reason, and over time."""
        return self._recent.of("misses", self._misses)

    def _misses(self) -> Misses:
        with self._questions.turn():
            tables = self._graph.tables
            pools = sum(tables.pool_blocks.values())
            return misses_view(tables.history, pools, self._graph.clock(), self._unix)

    def evictions(self, which: EvictionsAsked) -> Evictions:
        """Recent evictions."""
        return self._recent.of(("evictions", which), lambda: self._evictions(which))

    def _evictions(self, which: EvictionsAsked) -> Evictions:
        with self._questions.turn():
            return evictions_view(self._graph.tables, which, self._graph.clock(), self._unix)

    def ranking(self, engine: str | None, limit: int) -> RankingView:
        """Who goes next, with every term."""
        question = ("ranking", engine, limit)
        return self._recent.of(question, lambda: self._ranking(engine, limit))

    def _ranking(self, engine: str | None, limit: int) -> RankingView:
        with self._questions.turn():
            return ranking_view(self._graph, self._latest(), engine, limit, self._unix)

    def graph_version(self) -> int:
        """Changes when the graph did."""
        return self._graph.changes.total

    def graph(self, limit: int, session: str | None = None) -> GraphView:
        """The graph as columns; only what ``session`` holds if one is named."""
        question = ("graph", limit, session)
        return self._recent.of(question, lambda: self._columns(limit, session))

    def _columns(self, limit: int, session: str | None) -> GraphView:
        with self._questions.turn():
            row = None if session is None else session_row(self._graph.tables, session, None)
            return graph_view(self._graph, limit, row, self._unix)

    def block(self, key: int) -> BlockView:
        """One block, explained, with its history."""
        with self._questions.turn():
            explained = self._graph.explain(key, self._latest())
            history = block_history(self._graph.tables, key, self._unix)
        return BlockView(
            at=self._unix.now(), key=explained["id"], explain=explained, history=history
        )

    def sessions(self, limit: int, search: str = "") -> Sessions:
        """Sessions whose name or tenant contains ``search``."""
        return self._recent.of(("sessions", limit, search), lambda: self._sessions(limit, search))

    def _sessions(self, limit: int, search: str) -> Sessions:
        with self._questions.turn():
            now = self._graph.clock()
            return sessions_view(self._graph.tables, limit, search, now, self._unix)

    def session(self, name: str, tenant: str | None, after: str = "") -> SessionTimeline:
        """One session over time; from the turn of the mark ``after`` on, if that is known."""
        with self._questions.turn():
            explained = self._graph.explain_session(name, tenant)
            tables, now = self._graph.tables, self._graph.clock()
            row = session_row(tables, name, tenant)
            return timeline(tables, row, explained, now, self._unix, after)

    def engines(self) -> Engines:
        """All engines."""
        return engines_view(self._status(), self._graph.tables.history, self._unix.now())

    def shadows(self, engine: str | None) -> Shadows:
        """What others would have found."""
        now = self._graph.clock()
        if engine is not None:
            chosen_engine(self._graph.tables, engine)
        said = partial(who_ranks, self._graph)
        return shadows_view(self._shadows, engine, now, self._unix, said)

    def weights(self) -> Weights:
        """What decides the ranking."""
        return self._desk.weights()

    def preview(self, change: WeightChange, engine: str | None) -> WeightEffect:
        """What a change of weights would do."""
        return self._desk.preview(change, engine)

    def try_weights(self, change: WeightChange) -> Shadows:
        """Let a shadow have a change from now on; nothing else changes."""
        self._desk.try_weights(change)
        return self.shadows(None)

    def end_trial(self) -> Shadows:
        """Follow no other weights in a shadow any more."""
        self._desk.end_trial()
        return self.shadows(None)

    def change_weights(self, change: WeightChange) -> Weights:
        """Write a change to the configuration file, from which it takes effect within a second,
        a policy at the next start."""
        return self._desk.change_weights(change)

    def undo_weights(self) -> Weights:
        """Take the last change back."""
        return self._desk.undo_weights()

    def sampled(self, limit: int, session: str | None = None) -> Sampled:
        """Where the model looks, and how sure it is; of one session, if it is named."""
        question = ("sampled", limit, session)
        return self._recent.of(question, lambda: self._sampled(limit, session))

    def _sampled(self, limit: int, session: str | None) -> Sampled:
        with self._questions.turn():
            tables, now = self._graph.tables, self._graph.clock()
            row = None if session is None else session_row(tables, session, None)
            return sampled_view(tables, limit, now, self._unix, row)

    def caches(self, steps: int) -> Caches:
        """The last ``steps`` of each cache that follows confidence."""
        return self._recent.of(("caches", steps), lambda: self._caches.shown(steps))

    def note_steps(self, told: CacheSteps) -> CacheNoted:
        """Remember steps of such a cache."""
        return self._caches.note(told)

    def intend(self, wishes: IntentWishes) -> IntentReplies:
        """Do what is wanted of blocks and sessions; every wish is answered."""
        with self._questions.turn():
            replies = intent_replies(self._graph, wishes)
        if any(each.answer not in (Verdict.REJECTED, Verdict.MISSING) for each in replies):
            self._intended()
        return IntentReplies(at=self._unix.now(), answers=replies)


# What the API shows: the contract that the sidecar fulfils.


class PageSource(Protocol):
    """Answers the page's questions, from any thread.

    Each raises GraphError for a block, session or engine that nobody knows, and BusyError while
    the graph cannot be asked. ``engine`` None stands for the only engine, or the first of several.
    """

    def now(self) -> Now:
        """The first screen."""

    def requests(self, which: RequestsAsked) -> Requests:
        """Recent requests."""

    def misses(self) -> Misses:
        """Totals by reason, and over time."""

    def evictions(self, which: EvictionsAsked) -> Evictions:
        """Recent evictions."""

    def ranking(self, engine: str | None, limit: int) -> RankingView:
        """Who goes next, with every term."""

    def graph_version(self) -> int:
        """Changes when the graph did; costs nothing."""

    def graph(self, limit: int, session: str | None = None) -> GraphView:
        """The graph as columns; only what ``session`` holds if one is named."""

    def block(self, key: int) -> BlockView:
        """One block, explained, with its history."""

    def sessions(self, limit: int, search: str = "") -> Sessions:
        """Sessions whose name or tenant contains ``search``."""

    def session(self, name: str, tenant: str | None, after: str = "") -> SessionTimeline:
        """One session over time; from the turn of the mark ``after`` on, if that is known."""

    def engines(self) -> Engines:
        """All engines."""

    def shadows(self, engine: str | None) -> Shadows:
        """What others would have found."""

    def sampled(self, limit: int, session: str | None = None) -> Sampled:
        """Where the model looks, and how sure it is; up to ``limit`` blocks and sessions.

        Only what ``session`` holds, if one is named.
        """

    def caches(self, steps: int) -> Caches:
        """The last ``steps`` of each cache that follows confidence."""

    def note_steps(self, told: CacheSteps) -> CacheNoted:
        """Remember steps of such a cache."""

    def weights(self) -> Weights:
        """What decides the ranking."""

    def preview(self, change: WeightChange, engine: str | None) -> WeightEffect:
        """What a change of weights would do; raises ConfigError for one that is not allowed."""

    def try_weights(self, change: WeightChange) -> Shadows:
        """Let a shadow have a change from now on; raises ConfigError for one that is not
        allowed."""

    def end_trial(self) -> Shadows:
        """Follow no other weights in a shadow any more."""

    def change_weights(self, change: WeightChange) -> Weights:
        """Write a change to the configuration file; raises ConfigError where that cannot be."""

    def undo_weights(self) -> Weights:
        """Take the last change back; raises ConfigError where there is none."""

    def intend(self, wishes: IntentWishes) -> IntentReplies:
        """Do what is wanted of blocks and sessions; every wish is answered."""


# ``/v1/events``: news as server-sent events, each with an id to resume from.
#
# Every second (``BEAT_S``) in which something changed there is one event of type ``news`` whose
# data is ``News``; in others a comment, so that a dead connection is noticed. It brings those
# of the last 200 requests (``RECENT``) that began or ended since the event before; how an older
# one ends is told by ``/v1/requests`` alone. ``id`` is the newest request up to which all of
# these have ended, as far as their ends may still be heard of; a reader that reconnects with it
# in ``Last-Event-ID``, as browsers do by themselves, gets those behind it. Where more of them
# passed than are kept, ``is_gap`` says so: what is brought is all there is. The first event on
# a connection has the whole of Now's history; the others have its last steps. A reader that
# does not read is cut by the server (``dashboards.gate.timeouts``) and holds nobody up.

BEAT_S: Final = 1.0
RECENT: Final = 200  # requests that one event brings at most; chosen, as many as the page lists
_NEVER: Final = -2  # no request has this number


class News(Answer):
    """What changed since the event before.

    Attributes:
        version: The graph's; another one means that ``/v1/graph`` has changed.
        now: The first screen; of its history the steps that are new or may have changed.
        steps: How many steps the whole history has; those that are not in ``now.history`` are its
            first ones, and earlier events told them.
        requests: That began or ended since, the oldest first.
        is_gap: Some before them are not here, or they are another sidecar's: forget the others.
    """

    version: int
    now: Now
    steps: int
    requests: list[RequestView]
    is_gap: bool

    @property
    def newest(self) -> int | None:
        """The newest request; None before any."""
        return self.requests[-1].id if self.requests else None


class NewsStream:
    """One look at the source a beat, however many follow."""

    def __init__(self, page: Callable[[], PageSource]) -> None:
        self._page = page
        self._name = token_hex(4)  # a sidecar that comes next counts its requests anew
        self._latest: News | None = None
        self._fresh_until = 0.0
        self._looking = asyncio.Lock()

    async def follow(self, last_event_id: str) -> AsyncIterator[bytes]:
        """Frames for one reader, who has seen all up to ``last_event_id``, or nothing."""
        told: News | int | None = self._resumed(last_event_id)
        yield b"retry: 2000\n\n"
        while True:
            news = await self._look()
            if news is None:
                yield b": busy\n\n"
            elif (fresh := _fresh(news, told)) is None:
                yield b": nothing new\n\n"
            else:
                told = news
                yield self._frame(fresh, _settled(news))
            await asyncio.sleep(BEAT_S)

    def _resumed(self, last_event_id: str) -> int | None:
        """The request that an id names; None without one; ``_NEVER`` for another stream's."""
        if not last_event_id:
            return None
        number = number_in(last_event_id, self._name)
        return _NEVER if number is None else number

    async def _look(self) -> News | None:
        """The latest news, looked up anew where it is a beat old; None while too many ask."""
        loop = asyncio.get_running_loop()
        async with self._looking:
            if loop.time() < self._fresh_until:
                return self._latest
            try:
                self._latest = await run_in_threadpool(self._gather)
            except KvGraphError:
                return None
            self._fresh_until = loop.time() + 0.9 * BEAT_S
            return self._latest

    def _gather(self) -> News:
        page = self._page()
        version, now = page.graph_version(), page.now()
        recent = page.requests(RequestsAsked(RECENT))
        steps, requests = len(now.history.starts), recent.requests[::-1]
        return News(
            at=now.at, version=version, now=now, steps=steps, requests=requests, is_gap=False
        )

    def _frame(self, news: News, settled: int | None) -> bytes:
        mark = ""
        if settled is not None and settled >= 0:
            mark = f"id: {mark_of(self._name, settled)}\n"
        data = orjson.dumps(news.model_dump())
        return b"event: news\n%sdata: %s\n\n" % (mark.encode(), data)


def _settled(news: News) -> int | None:
    """The last request before the first one that may still change; the newest if none may; None
    before any."""
    changeable = (each.id - 1 for each in news.requests if each.is_awaited)
    return next(changeable, news.newest)


def _changeable(request: RequestView) -> tuple[str | None, str | None]:
    """What may change of a request; not its times, which are a millisecond apart from look to
    look."""
    return request.finished, None if request.miss is None else request.miss.reason


def _fresh(news: News, told: News | int | None) -> News | None:
    """What a reader lacks; None for nothing.

    Args:
        told: The news that the reader was told last on this connection; or the request up to which
            it knew all when it came; None: it knows nothing.
    """
    requests, now = news.requests, news.now
    last = told.newest if isinstance(told, News) else told
    newest, oldest = news.newest, requests[0].id if requests else 0
    is_gap = last is not None and (newest is None or not oldest - 1 <= last <= newest)
    if is_gap:  # too much passed, or the number is of a sidecar before this one
        fresh = requests
    elif isinstance(told, News):
        known = {each.id: _changeable(each) for each in told.requests}
        fresh = [each for each in requests if known.get(each.id) != _changeable(each)]
    else:
        fresh = [each for each in requests if last is None or each.id > last]
    if isinstance(told, News):
        if told.version == news.version and not fresh:
            return None
        now = now.model_copy(update={"history": _since(now.history, told.now.history)})
    return news.model_copy(update={"now": now, "requests": fresh, "is_gap": is_gap})


def _since(history: TokenHistory, told: TokenHistory) -> TokenHistory:
    """The steps that a reader lacks, and before them the last two that it was told: these may
    have counted more since. All steps, where they have another length by now."""
    if told.step_s != history.step_s or len(told.starts) < 2:
        return history
    # Clocks drift: the same step's start may be told a little earlier or later.
    first = bisect_left(history.starts, told.starts[-2] - history.step_s / 2)
    return history.model_copy(
        update={name: column[first:] for name, column in history if isinstance(column, list)}
    )


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
