"""``LifeBook``: when each block of a recording was stored, and when it left."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from ...graph.kvcache_graph import KVCacheGraph
from ...graph.messages.events import (
    AnyEvent,
    BlocksCleared,
    BlocksLoaded,
    BlocksRemoved,
    BlocksResident,
    BlocksStored,
)
from ...graph.queries.views import block_name
from ...graph.types import LAYER_NAMES, NO_ROW, as_keys
from .happened import BlockLife, PoolPoint

_POINTS_APART_S: Final = 0.1  # of a pool's size over time; chosen


class _Stay(NamedTuple):
    engine: str
    key: int


class LifeBook:
    """Is told each engine's events after the graph took them.

    Args:
        graph: Knows whose a block is.
        most: Lives that are kept: those that ended last.
    """

    def __init__(self, graph: KVCacheGraph, most: int) -> None:
        self._graph = graph
        self._since: dict[_Stay, float] = {}
        self._sizes: dict[str, int] = {}
        self._points: list[PoolPoint] = []
        self._ended: deque[BlockLife] = deque(maxlen=most)

    @property
    def points(self) -> Sequence[PoolPoint]:
        """The sizes of pools over time."""
        return self._points

    def note(self, engine: str, events: Sequence[AnyEvent], now: float) -> None:
        """Note what entered and left an engine's pool."""
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
        """Those that ended, in that order, and then those that did not."""
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
        last = next((p for p in reversed(self._points[-64:]) if p.engine == engine), None)
        if size is None or (last and (last.blocks == size or now - last.at < _POINTS_APART_S)):
            return
        self._points.append(PoolPoint(now, engine, size))

    def _lives(
        self, stays: Sequence[tuple[_Stay, float]], end: float | None, why: str | None
    ) -> Iterator[BlockLife]:
        """The lives of blocks that were stored when it says so."""
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
