"""Collects what happened in a time span: from a running sidecar, a raw log or a trace."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from ...graph.errors import ConfigError
from ...graph.explain import block_name
from ...graph.kvcache_graph import KVCacheGraph
from ...graph.logs.evictions import LIMIT as EVICTIONS_KEPT
from ...graph.logs.evictions import EvictionLog
from ...graph.logs.requests import LIMIT as REQUESTS_KEPT
from ...graph.snapshot import load
from ...graph.types import LAYER_NAMES, NO_ROW, as_keys
from ...graph.wire.events import (
    AnyEvent,
    BlocksCleared,
    BlocksLoaded,
    BlocksRemoved,
    BlocksResident,
    BlocksStored,
    EngineHello,
)
from ..page.evictions import EvictionView, eviction_view
from ..page.graph import GraphView, graph_view
from ..page.misses import BlockCounts, RequestView, request_view
from ..replay.reader import RECORDED, Line, decode_line, detect, read_lines
from ..replay.recorder import RawBatch, read_raw_log
from ..replay.trace import TraceError
from ..words.times import seconds, time_of_day
from .remote import ask_patiently, only_sidecar_url

# Later times are Unix seconds: no recording lasts eleven days. Chosen.
_LONGEST_RECORDING_S: Final = 1e6

NOT_RECORDED = "not recorded"  # the rule of an eviction in a raw log, which holds no rankings


@dataclass(frozen=True, slots=True)
class BlockLife:
    """A block's stay in an engine's pool."""

    engine: str
    key: str
    layer: str
    session: str | None
    begin: float  # when it was stored, or its last use where only that is known
    since_use: bool  # whether `begin` is the last use
    end: float | None  # None: it is still there
    why: str | None


@dataclass(frozen=True, slots=True)
class PoolPoint:
    """The number of blocks in an engine's pool at one time."""

    at: float
    engine: str
    blocks: int


@dataclass(frozen=True, slots=True)
class Minute:
    """Sums over one minute: all that is known from before the logs of records begin."""

    at: float
    asked: int  # prompt tokens
    found: int  # of these
    asked_blocks: int  # full prompt blocks, in each engine's own block size
    evicted: int
    wanted: int  # evicted blocks that were requested again
    requests: Mapping[str, int]  # by reason
    blocks: Mapping[str, int]  # that requests computed, by reason


@dataclass(frozen=True, slots=True)
class Activity:
    """What is known of a time span, in chronological order.

    Times are Unix seconds, or seconds since the beginning of a recording.
    """

    name: str  # the source, for display
    begin: float
    end: float
    engines: Mapping[str, str]  # id → name
    requests: Sequence[RequestView]
    evictions: Sequence[EvictionView] | None  # None: the source does not record them
    lives: Sequence[BlockLife]
    pools: Sequence[PoolPoint]
    has_reasons: bool  # whether requests have reasons for their misses
    unknown: Sequence[str]  # what is missing, in sentences
    minutes: Sequence[Minute] = ()  # reach back further than records
    since: float = 0.0  # where records begin

    @property
    def is_live(self) -> bool:
        """Whether times are Unix seconds rather than those of a recording."""
        return self.begin > _LONGEST_RECORDING_S

    def between(self, begin: float, end: float, name: str) -> Activity:
        left = self.evictions
        return replace(
            self,
            name=name,
            begin=begin,
            end=end,
            requests=[each for each in self.requests if begin <= each.at < end],
            evictions=None if left is None else [e for e in left if begin <= e.at < end],
            lives=[each for each in self.lives if begin <= each.begin < end],
            pools=[each for each in self.pools if begin <= each.at < end],
            minutes=[each for each in self.minutes if begin <= each.at < end],
        )


_POINTS_APART_S: Final = 0.1  # of a pool's size over time; chosen


class _Stay(NamedTuple):
    engine: str
    key: int


class BlockLives:
    """Follows when each block of a recording was stored and left."""

    def __init__(self, graph: KVCacheGraph, most: int) -> None:
        self.points: list[PoolPoint] = []
        self._graph = graph
        self._since: dict[_Stay, float] = {}
        self._sizes: dict[str, int] = {}
        self._ended: deque[BlockLife] = deque(maxlen=most)  # the last to end are kept

    def note(self, engine: str, events: Sequence[AnyEvent], now: float) -> None:
        """Note an engine's events, after the graph applied them."""
        for event in events:
            match event:
                case BlocksStored() | BlocksLoaded():
                    self._enter(engine, as_keys(event.hashes).tolist(), now)
                case BlocksRemoved():
                    self._leave(engine, as_keys(event.hashes).tolist(), now, "evicted")
                case BlocksCleared():
                    self._leave(engine, self._held(engine), now, "reset")
                case BlocksResident():
                    listed = set(as_keys(event.hashes).tolist())
                    gone = [key for key in self._held(engine) if key not in listed]
                    self._leave(engine, gone, now, "news of it was lost")
                    self._enter(engine, list(listed), now)
                case _:
                    continue
        self._point(engine, now)

    def lives(self) -> list[BlockLife]:
        """Finished lives in order of their end, then unfinished ones."""
        return [*self._ended, *self._lives(list(self._since.items()), None, None)]

    def _held(self, engine: str) -> list[int]:
        return [stay.key for stay in self._since if stay.engine == engine]

    def _enter(self, engine: str, keys: list[int], now: float) -> None:
        before = len(self._since)
        for key in keys:
            self._since.setdefault(_Stay(engine, key), now)
        self._resize(engine, len(self._since) - before)

    def _leave(self, engine: str, keys: list[int], now: float, why: str) -> None:
        stays = [_Stay(engine, key) for key in keys]
        left = [(stay, self._since.pop(stay)) for stay in stays if stay in self._since]
        self._ended.extend(self._lives(left, now, why))
        self._resize(engine, -len(left))

    def _resize(self, engine: str, by: int) -> None:
        self._sizes[engine] = self._sizes.get(engine, 0) + by

    def _point(self, engine: str, now: float) -> None:
        size = self._sizes.get(engine)
        last = next((p for p in reversed(self.points[-64:]) if p.engine == engine), None)
        if size is None or (last and (last.blocks == size or now - last.at < _POINTS_APART_S)):
            return
        self.points.append(PoolPoint(now, engine, size))

    def _lives(
        self, stays: Sequence[tuple[_Stay, float]], end: float | None, why: str | None
    ) -> Iterator[BlockLife]:
        tables = self._graph.tables
        blocks, sessions = tables.blocks, tables.sessions
        salts = {name: tables.salt(column) for name, column in tables.engines.items()}
        keys = as_keys([stay.key for stay, _ in stays])
        rows = blocks.find(keys ^ as_keys([int(salts.get(stay.engine, 0)) for stay, _ in stays]))
        for (stay, begin), row in zip(stays, rows.tolist(), strict=True):
            session = NO_ROW if row == NO_ROW else int(blocks.session[row])
            yield BlockLife(
                engine=stay.engine,
                key=block_name(stay.key),
                layer="unknown" if row == NO_ROW else LAYER_NAMES[blocks.layer[row]],
                session=None if session == NO_ROW else sessions.names[session],
                begin=begin,
                since_use=False,
                end=end,
                why=why,
            )


_MOST_REQUESTS: Final = 500_000  # gathered from one log; chosen: a kilobyte each


class ReplayedLog:
    """A raw log, replayed through a graph, whose logs are collected before they forget."""

    def __init__(self, path: Path, most_evictions: int) -> None:
        self._path, self._now = path, 0.0
        self.graph = KVCacheGraph(clock=lambda: self._now)
        self._names: dict[str, str] = {}
        self._lives = BlockLives(self.graph, most_evictions)
        self._requests = deque[RequestView](maxlen=_MOST_REQUESTS)
        self._evictions = deque[EvictionView](maxlen=most_evictions)
        self._taken = 0  # requests that were gathered
        self._taken_of: dict[str, tuple[EvictionLog, int]] = {}
        for batch in read_raw_log(path):
            self._play(batch)
        self._gather_requests(0)
        for engine in self.graph.engines:
            self._gather_evictions(engine, 0)

    def activity(self) -> Activity:
        return Activity(
            name=self._path.name,
            begin=0.0,
            end=self._now,
            engines=self._names,
            requests=list(self._requests),
            evictions=sorted(self._evictions, key=lambda each: each.at),
            lives=self._lives.lives(),
            pools=self._lives.points,
            has_reasons=True,
            unknown=list(self._unknown()),
        )

    def _unknown(self) -> list[str]:
        lost = sum(number for _, number in self._taken_of.values()) - len(self._evictions)
        notes = ["A raw log holds no rankings: by which rule a block left is not known."]
        if self._taken > len(self._requests):
            notes.append(f"Only the last {len(self._requests):,} requests are here.")
        if lost > 0:
            notes.append(f"{lost:,} earlier evictions are not here.")
        return notes

    def _play(self, batch: RawBatch) -> None:
        self._now = batch.at
        for event in batch.events:
            if isinstance(event, EngineHello):
                self._names[batch.engine] = event.engine
        self.graph.apply(batch.engine, batch.events)
        self._lives.note(batch.engine, batch.events, batch.at)
        if self.graph.tables.history.requests.next - self._taken > REQUESTS_KEPT // 2:
            self._gather_requests(REQUESTS_KEPT // 4)
        self._gather_evictions(batch.engine, EVICTIONS_KEPT // 2)

    def _gather_requests(self, left: int) -> None:
        """Collect all requests but the newest ``left``, which may still change."""
        history = self.graph.tables.history
        log = history.requests
        for number in range(max(self._taken, log.first), log.next - left):
            self._requests.append(_unruled(request_view(history, number, float)))
        self._taken = max(self._taken, log.next - left)

    def _gather_evictions(self, engine: str, left: int) -> None:
        tables = self.graph.tables
        log = tables.history.evictions.get(tables.engines.get(engine, -1))
        if log is None:
            return
        known, taken = self._taken_of.get(engine, (log, 0))
        taken = taken if known is log else 0
        if left and log.next - taken <= left:
            return
        for number in range(max(taken, log.first), log.next - left // 2):
            view = eviction_view(tables, engine, log, number, float)
            self._evictions.append(view.model_copy(update=_NO_RULE))
        self._taken_of[engine] = log, max(taken, log.next - left // 2)


_NO_RULE: Final = {
    "rule": NOT_RECORDED,
    "sentence": "A raw log does not say by which rule it left.",
}


def _unruled(request: RequestView) -> RequestView:
    miss = request.miss
    if miss is None or miss.reason != "evicted":
        return request
    ago = "" if miss.evicted_at is None else f" {seconds(request.at - miss.evicted_at)} before"
    sentence = f"Block {miss.index + 1} of {request.blocks.asked} left the pool{ago}."
    return request.model_copy(update={"miss": miss.model_copy(update={"sentence": sentence})})


_PAGE: Final = 1_000  # records of one answer: the API's bound
MOST_NODES: Final = 200_000  # the API's bound


def activity_at(url: str, most_evictions: int) -> Activity:
    status = ask_patiently(url, "/v1/engines")
    now, names = status["at"], {each["id"]: each["name"] for each in status["engines"]}
    requests, reach = _requests(url)
    cut = {"requests": reach}
    evictions: list[EvictionView] = []
    for engine in ask_patiently(url, "/v1/evictions?limit=1")["engines"]:
        found, cut[f"evictions of {names.get(engine, engine)}"] = _evictions(
            url, engine, most_evictions
        )
        evictions += found
    evictions.sort(key=lambda each: each.at)
    return Activity(
        name=url,
        begin=min((*(r.at for r in requests[:1]), *(e.at for e in evictions[:1])), default=now),
        end=now,
        engines=names,
        requests=requests,
        evictions=evictions,
        lives=[_life(each) for each in evictions],
        pools=[],
        has_reasons=True,
        unknown=[_reach(what, at, now) for what, at in cut.items() if at is not None],
        minutes=list(_minutes(ask_patiently(url, "/v1/misses"))),
        since=max((at for at in cut.values() if at is not None), default=0.0),
    )


def _requests(url: str) -> tuple[list[RequestView], float | None]:
    """All requests, oldest first; and when the log begins, if it lost earlier ones."""
    found = [RequestView.model_validate(each) for each in _paged(url, "/v1/requests?", "requests")]
    return found[::-1], found[-1].at if found and found[-1].id else None


def _evictions(url: str, engine: str, most: int) -> tuple[list[EvictionView], float | None]:
    """An engine's evictions; and when the log begins, if it lost earlier ones."""
    records = _paged(url, f"/v1/evictions?engine={quote(engine, safe='')}&", "evictions")
    found = [EvictionView.model_validate(each) for each in islice(records, most)]
    return found, found[-1].at if found and found[-1].id else None


def _minutes(misses: Mapping[str, Any]) -> Iterator[Minute]:
    for place, at in enumerate(misses["starts"]):
        yield Minute(
            at=at,
            asked=misses["asked"][place],
            found=misses["found"][place],
            asked_blocks=misses["asked_blocks"][place],
            evicted=misses["evicted"][place],
            wanted=misses["wanted"][place],
            requests={reason: steps[place] for reason, steps in misses["requests"].items()},
            blocks={reason: steps[place] for reason, steps in misses["blocks"].items()},
        )


def graph_at(url: str) -> GraphView:
    return GraphView.model_validate(ask_patiently(url, f"/v1/graph?limit={MOST_NODES}", 60.0))


def _paged(url: str, path: str, what: str) -> Iterator[dict[str, Any]]:
    """All records of a log, newest first."""
    answer = ask_patiently(url, f"{path}limit={_PAGE}")
    yield from answer[what]
    while answer["next"] is not None:
        answer = ask_patiently(url, f"{path}limit={_PAGE}&before={answer['next']}")
        yield from answer[what]


def _reach(what: str, at: float, now: float) -> str:
    return (
        f"The log of {what} reaches back {seconds(now - at)}, to {time_of_day(at)}; of what was "
        "before, sums by the minute are known."
    )


def _life(left: EvictionView) -> BlockLife:
    return BlockLife(
        engine=left.engine,
        key=left.key,
        layer=left.layer,
        session=left.session,
        begin=left.at - left.idle_s,
        since_use=True,
        end=left.at,
        why=left.rule,
    )


_UNKNOWN = (
    "A trace tells what requests found in the pool. Why they found no more, what came from colder "
    "tiers and what was evicted is in raw logs alone (`kvgraph record --raw`)."
)


def activity_in_trace(path: Path) -> Activity:
    """Read the requests of a trace by ``kvgraph record``; traces hold no reasons."""
    requests: list[RequestView] = []
    size = 0
    for number, data in read_lines(path):
        try:
            line = decode_line(data)
            if number == 1:
                size = _block_size(line)
            else:
                RECORDED.check(line)
                requests.append(_request(line, len(requests), size))
        except TraceError as error:
            raise TraceError(f"{path}:{number}: {error}") from None
    requests.sort(key=lambda each: each.at)
    return Activity(
        name=path.name,
        begin=0.0,
        end=max((each.ended_at or each.at for each in requests), default=0.0),
        engines={"recorded": "recorded"},
        requests=requests,
        evictions=None,
        lives=[],
        pools=[],
        has_reasons=False,
        unknown=[_UNKNOWN],
    )


def _block_size(first: Line) -> int:
    if detect(first) is not RECORDED or first.block_size is None:
        raise TraceError("a trace of this format does not say what requests found in a cache")
    return first.block_size


def _request(line: Line, number: int, size: int) -> RequestView:
    tokens, took, at = line.input_length or 0, line.seconds, line.at or 0.0
    asked = tokens // size
    found = min(asked, (line.cached_tokens or 0) // size)
    return RequestView(
        id=number,
        request=str(number),
        engine="recorded",
        session=line.session,
        tenant=line.tenant,
        at=at,
        prompt_tokens=tokens,
        block_size=size,
        blocks=BlockCounts(
            asked=asked, pool=found, loaded=0, prefetched=0, spliced=0, computed=asked - found
        ),
        finished=None if took is None else "finished",
        ended_at=None if took is None else at + took,
        expected_pause_s=line.expected_return_s,
        miss=None,
    )


MOST_EVICTIONS: Final = 200_000  # that are read at most; chosen
_SNAPSHOT: Final = b"KVGSNAP"


class Kind(Enum):
    SIDECAR = "a running sidecar"
    RAW_LOG = "a raw log"
    TRACE = "a trace"
    SNAPSHOT = "a snapshot"


@dataclass(frozen=True, slots=True)
class Origin:
    """A sidecar's URL or a file, to read from."""

    kind: Kind
    name: str

    def activity(self, most_evictions: int = MOST_EVICTIONS) -> Activity:
        """Read what happened; raises KvGraphError where that is not recorded."""
        match self.kind:
            case Kind.SIDECAR:
                return activity_at(self.name, most_evictions)
            case Kind.RAW_LOG:
                return ReplayedLog(Path(self.name), most_evictions).activity()
            case Kind.TRACE:
                return activity_in_trace(Path(self.name))
            case Kind.SNAPSHOT:
                raise ConfigError(
                    f"{self.name} is a snapshot: it holds a graph, and not what happened; allowed: "
                    "a running sidecar, or what `kvgraph record --raw` wrote"
                )

    def graph(self) -> GraphView:
        """Read the graph as of now, of a log's end, or of the snapshot; raises KvGraphError."""
        match self.kind:
            case Kind.SIDECAR:
                return graph_at(self.name)
            case Kind.RAW_LOG:
                return _view(ReplayedLog(Path(self.name), 1).graph)
            case Kind.SNAPSHOT:
                graph = KVCacheGraph()
                load(graph, Path(self.name))
                return _view(graph)
            case Kind.TRACE:
                raise ConfigError(
                    f"{self.name} is a trace: it holds requests, and no graph; allowed: a running "
                    "sidecar, a snapshot, or what `kvgraph record --raw` wrote"
                )


def origin_of(name: str | None) -> Origin:
    """The source with this name: a file, a URL, or the only running sidecar."""
    if name is not None and not name.startswith(("http://", "https://")):
        return Origin(_kind_of(Path(name)), name)
    return Origin(Kind.SIDECAR, only_sidecar_url(name))


def _kind_of(path: Path) -> Kind:
    for _, line in read_lines(path):
        if line.startswith(_SNAPSHOT):
            return Kind.SNAPSHOT
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            fields = None
        return Kind.RAW_LOG if isinstance(fields, dict) and "event" in fields else Kind.TRACE
    raise ConfigError(f"{path} is empty")


def _view(graph: KVCacheGraph) -> GraphView:
    return graph_view(graph, MOST_NODES, None, float)
