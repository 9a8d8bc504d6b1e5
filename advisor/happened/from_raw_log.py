"""Plays a raw log through a graph, and gathers what its logs say before they forget it."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Final

from ...dashboards.answers.evictions import EvictionView
from ...dashboards.answers.misses import RequestView
from ...graph.kvcache_graph import KVCacheGraph
from ...graph.logs.evictions.eviction_log import LIMIT as EVICTIONS_KEPT
from ...graph.logs.evictions.eviction_log import EvictionLog
from ...graph.logs.request_log import LIMIT as REQUESTS_KEPT
from ...graph.messages.events import EngineHello
from ..page.logged.eviction_views import eviction_view
from ..page.logged.request_views import request_view
from ..replay.traces.raw_events import RawBatch, read_raw_log
from ..times.spoken_times import seconds
from .block_lives import LifeBook
from .happened import NOT_RECORDED, Happened

_MOST_REQUESTS: Final = 500_000  # gathered from one log; chosen: a kilobyte each


class PlayedLog:
    """A raw log, played from its beginning to its end.

    Args:
        most_evictions: That are gathered: the last ones.

    Attributes:
        graph: As it is at the log's end.

    Raises:
        TraceError: The file cannot be read, or is no raw log.
    """

    def __init__(self, path: Path, most_evictions: int) -> None:
        self._path, self._now = path, 0.0
        self.graph = KVCacheGraph(clock=lambda: self._now)
        self._names: dict[str, str] = {}
        self._lives = LifeBook(self.graph, most_evictions)
        self._requests = deque[RequestView](maxlen=_MOST_REQUESTS)
        self._evictions = deque[EvictionView](maxlen=most_evictions)
        self._taken = 0  # requests that were gathered
        self._taken_of: dict[str, tuple[EvictionLog, int]] = {}
        for batch in read_raw_log(path):
            self._play(batch)
        self._gather(0)

    def happened(self) -> Happened:
        """All that was gathered."""
        return Happened(
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
        said = ["A raw log holds no rankings: by which rule a block left is not known."]
        if self._taken > len(self._requests):
            said.append(f"Only the last {len(self._requests):,} requests are here.")
        if lost > 0:
            said.append(f"{lost:,} earlier evictions are not here.")
        return said

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

    def _gather(self, left: int) -> None:
        self._gather_requests(left)
        for engine in self.graph.engines:
            self._gather_evictions(engine, left)

    def _gather_requests(self, left: int) -> None:
        """Gather all but the newest ``left``, which may still change."""
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
    "rule": NOT_RECORDED, "sentence": "A raw log does not say by which rule it left."
}  # fmt: skip


def _unruled(request: RequestView) -> RequestView:
    """A request whose sentence names no rule of an eviction."""
    miss = request.miss
    if miss is None or miss.reason != "evicted":
        return request
    ago = "" if miss.evicted_at is None else f" {seconds(request.at - miss.evicted_at)} before"
    said = f"Block {miss.index + 1} of {request.blocks.asked} left the pool{ago}."
    return request.model_copy(update={"miss": miss.model_copy(update={"sentence": said})})
