"""Splits events into runs that are applied together, and releases old ghost rows."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Final, NamedTuple, TypeVar

import numpy as np
from msgspec.structs import replace

from ..compiled import core
from ..tables.blocks import Mask, Times
from ..tables.tables import Tables
from ..types import HELD, Rows
from ..wire.events import (
    AnyEvent,
    BlocksEmbedded,
    BlocksLoaded,
    BlocksRemoved,
    BlocksSpilled,
    BlocksStored,
    CopiesDropped,
    RequestFinished,
    RequestStarted,
)

SLICE_KEYS: Final = 4_096
"""Block keys applied while the graph's lock is held once: a millisecond or two; chosen. A single
request with a longer chain exceeds it."""

_LEAST_KEYS: Final = 128
"""Least time of a request or run, in keys, even if it has none: tens of microseconds, and a batch
without keys has thousands; chosen.
"""

CHURN: Final = (BlocksStored, BlocksRemoved)
TURNS: Final = (RequestStarted, RequestFinished)
SINGLE: Final[tuple[type, ...]] = ()

_RUNS: Final[dict[type, tuple[type, ...]]] = {
    **dict.fromkeys(CHURN, CHURN),
    **dict.fromkeys(TURNS, TURNS),
}
_CUT: Final = (BlocksStored, BlocksRemoved, BlocksSpilled, BlocksLoaded, CopiesDropped)
_BYTES: Final = 8 * SLICE_KEYS
_EMBEDDING: Final = 128  # keys that take as long as finding one embedding's neighbours; measured


class Run(NamedTuple):
    kind: tuple[type, ...]  # ``CHURN`` or ``TURNS``; a ``SINGLE`` run has one event
    events: list[AnyEvent]
    keys: int  # block keys that they carry, or the equivalent in time


def event_runs(events: Sequence[AnyEvent]) -> Iterator[Run]:
    at = 0
    while at < len(events):
        event = events[at]
        kind, at = _RUNS.get(type(event), SINGLE), at + 1
        size = _key_bytes(event)
        if size > _BYTES:
            parts = _parts(event)
            event = next(parts)
            for part in parts:
                yield Run(kind, [event], SLICE_KEYS)
                event = part
            size = _key_bytes(event)
        run = [event]
        if kind is not SINGLE and size <= _BYTES:
            least = 8 * _LEAST_KEYS if kind is TURNS else 8
            end, more = core.run_end(events, at, kind, _BYTES - size, least)
            run += events[at:end]
            at, size = end, size + more
        yield Run(kind, run, max(size // 8, _LEAST_KEYS))


def _key_bytes(event: AnyEvent) -> int:
    """How many bytes of keys an event is applied with, or the equivalent in time: those that a tip
    leaves out come back.
    """
    size = len(getattr(event, "hashes", b"")) + 8 * int(getattr(event, "skipped", 0))
    return size * _EMBEDDING if isinstance(event, BlocksEmbedded) else size


def _parts(event: AnyEvent) -> Iterator[AnyEvent]:
    """Split an event with many keys into equivalent smaller ones; others stay as they are. An event
    whose keys are malformed stays whole and is refused later.
    """
    if isinstance(event, BlocksEmbedded):
        yield from _embedded_parts(event)
        return
    if not isinstance(event, _CUT) or len(event.hashes) % 8:
        yield event
        return
    hashes = event.hashes
    for start in range(0, len(hashes), _BYTES):
        part = replace(event, hashes=hashes[start : start + _BYTES])
        if start and isinstance(part, BlocksStored):
            part = replace(part, parent=int.from_bytes(hashes[start - 8 : start], "little"))
        yield part


def _embedded_parts(event: BlocksEmbedded) -> Iterator[BlocksEmbedded]:
    count, width, step = len(event.hashes) // 8, 2 * event.dim, SLICE_KEYS // _EMBEDDING
    if len(event.hashes) % 8 or len(event.vectors) != width * count:
        yield event
        return
    for first in range(0, count, step):
        end = first + step
        hashes, vectors = event.hashes[8 * first : 8 * end], event.vectors
        yield replace(event, hashes=hashes, vectors=vectors[width * first : width * end])


# ``oldest`` finds the least recently used rows without copying all times at once. It takes a sample
# of the times and searches this many places around the boundary in it, where the true boundary
# nearly always lies, among few other times. All chosen.
_SAMPLE: Final = 4_096
_AROUND: Final = 256
_PARTS: Final = 8  # parts processed in one slice

S = TypeVar("S")
T = TypeVar("T")


def oldest(rows: Sequence[Rows], times: Sequence[Times], count: int) -> Generator[None, None, Rows]:
    """Return the ``count`` rows with the smallest times, int32, of ``rows``, ascending int32
    ``[n]`` each; among equal times the first ones. Works in slices; there must be at least
    ``count`` rows.
    """
    if not count:
        return np.empty(0, dtype=np.int32)
    border = yield from _nth(times, count - 1)
    left = count - sum((yield from _each(times, lambda part: np.count_nonzero(part < border))))

    def chosen(own: Rows, part: Times) -> Rows:
        nonlocal left
        older, ties = part < border, np.flatnonzero(part == border)[:left]
        older[ties] = True
        left -= len(ties)
        return own[older]

    found = yield from _each(list(zip(rows, times, strict=True)), lambda both: chosen(*both))
    return np.concatenate(found)


def _nth(times: Sequence[Times], place: int) -> Generator[None, None, float]:
    total = sum(map(len, times))
    step = -(-total // _SAMPLE)
    sample = np.sort(np.concatenate([part[::step] for part in times]))
    near = place * len(sample) // total
    low = sample[near - _AROUND] if near >= _AROUND else -np.inf
    high = sample[near + _AROUND] if near + _AROUND < len(sample) else np.inf
    yield
    before = sum((yield from _each(times, lambda part: np.count_nonzero(part < low))))
    upto = sum((yield from _each(times, lambda part: np.count_nonzero(part <= high))))
    if not before <= place < upto:
        low, high = -np.inf, np.inf
    # Many may have the time of a border: those that came in one batch.
    left = place - sum((yield from _each(times, lambda part: np.count_nonzero(part <= low))))
    if left < 0:
        return float(low)
    within = yield from _each(times, lambda part: part[(part > low) & (part < high)])
    between = np.concatenate(within)
    yield
    return float(np.partition(between, left)[left] if left < len(between) else high)


def _each(parts: Sequence[S], look: Callable[[S], T]) -> Generator[None, None, list[T]]:
    found = list[T]()
    for part in parts:
        found.append(look(part))
        if len(found) % _PARTS == 0:
            yield
    return found


_PART: Final = 1 << 12  # rows released in one slice; chosen
_EDGES: Final = 1 << 13  # edges examined in one slice; chosen
_AT_ONCE: Final = 1 << 17  # rows released after one batch, the rest after the next; chosen
_NONE: Final[Rows] = np.empty(0, dtype=np.int32)


class GhostKeeper:
    """Releases rows of blocks that no engine holds any more (ghosts), the least recently used
    first. ``forget_all`` is called once with all rows about to be reused, as bool
    ``[blocks.size]``; ``forget_some`` with each slice's rows, int32, before they are released.
    """

    def __init__(
        self,
        tables: Tables,
        forget_all: tuple[Callable[[Mask], None], ...],
        forget_some: tuple[Callable[[Rows], None], ...],
    ) -> None:
        self._tables = tables
        self._forget_all = forget_all
        self._forget_some = forget_some
        self._limits = tables.limits
        self._above = self._most()  # blocks, from which on ghosts are counted

    def releasing(self) -> Iterator[None]:
        """Release ghosts beyond the limit, slice by slice; no event may be applied meanwhile.
        References to them are removed first, then their rows.
        """
        rows = yield from self._surplus()
        if not len(rows):
            return
        yield
        gone = np.zeros(self._tables.blocks.size, dtype=np.bool_)
        gone[rows] = True
        yield
        yield from self._losing_edges(rows, gone)
        for forget in self._forget_all:
            forget(gone)
            yield
        yield from self._tables.links.releasing(gone)
        for start in range(0, len(rows), _PART):
            yield
            some = rows[start : start + _PART]
            for release in self._forget_some:
                release(some)
            self._tables.blocks.release(some)

    def _losing_edges(self, rows: Rows, gone: Mask) -> Iterator[None]:
        """Remove the edges at ``rows``; a scan only if there is one."""
        edges, has_edges = self._tables.edges, False
        for sums in list(self._tables.blocks.sums.values()):
            has_edges |= bool(sums.degree[rows].any())
            yield
        if has_edges:
            for start in range(0, edges.size, _EDGES):
                edges.remove(edges.at(gone, start, min(start + _EDGES, edges.size)))
                yield

    def _surplus(self) -> Generator[None, None, Rows]:
        """int32, ascending: the ghosts to release now; notes when to check again."""
        blocks = self._tables.blocks
        if self._limits is not self._tables.limits:
            self._limits, self._above = self._tables.limits, self._most()
        if len(blocks) <= self._above:
            return _NONE  # not when an engine leaves, either: it may be back in a moment
        limit = self._most()
        ghosts, times = list[Rows](), list[Times]()
        for part in blocks.parts():
            rows, used = core.unheld(blocks, part.start, part.stop, HELD)
            ghosts.append(np.frombuffer(rows, dtype=np.int32))
            times.append(np.frombuffer(used, dtype=np.float64))
            yield
        known = sum(map(len, ghosts))
        surplus = known - limit * 3 // 4 if known > limit else 0
        count = min(surplus, _AT_ONCE)
        left = len(blocks) - count
        self._above = left if count < surplus else max(limit, left + limit // 4)
        return (yield from oldest(ghosts, times, count))

    def _most(self) -> int:
        """How many ghosts are kept: ``max_ghosts``, or a share of the engines' pools if larger."""
        limits, pools = self._tables.limits, sum(self._tables.pool_blocks.values())
        return max(limits.max_ghosts, int(limits.ghost_share * pools))
