"""The log of requests, from when they are first scheduled: a ring of columns, and their names."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, takewhile
from math import isnan, nan
from secrets import token_hex
from struct import Struct as Packing
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from zlib import crc32

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from ..tables.columns import grown
from ..types import MAX_ENGINES, Rows
from ..wire.events import HOLD_ENDS
from .reasons import Detail, Reason

if TYPE_CHECKING:
    from ..wire.events import RequestFinished


class Miss(Struct, frozen=True, gc=False):
    """The first block that a prompt did not find, and why."""

    index: int  # index of the block in the prompt
    key: int  # the engine's key of the block; 0: no key
    reason: Reason
    # A ``DepartureRule`` for EVICTED, a ``Cause`` for COPY_LOST, a group index for OTHER_GROUP,
    # else a ``Detail``.
    detail: int = Detail.NONE
    eviction: int = -1  # record id in the engine's eviction log; -1: none
    # When the block left the pool, in the clock's seconds; NaN: it did not leave.
    left: float = float("nan")
    # Name and tenant of the other session involved.
    session: tuple[str | None, str | None] = (None, None)
    engine: str | None = None  # another engine that has the block
    # Roughly how many blocks the pool was too small to keep all blocks that this request computes
    # again: the evictions since the oldest of them left; 0: unknown.
    short: int = 0
    # Leading tokens of the block that a known prompt shares before diverging; 0: unknown.
    same: int = 0

    def keeping_all(self, short: int) -> Miss:
        """Return the same miss with ``short`` raised to at least this value, if it has one."""
        return replace(self, short=max(self.short, short)) if self.short else self


class Hold(NamedTuple):
    seconds: float  # how long it was held
    reason: str  # why it was released: one of ``HOLD_ENDS``
    fitting: int  # sessions that fit, according to the advice that held it; 0: unknown
    live: int  # live sessions, according to the same advice


class PromptBlocks(Struct, frozen=True, gc=False):
    """What a request asked for and found, in blocks except for ``tokens`` and ``size``."""

    tokens: int
    size: int
    asked: int
    pool: int
    loaded: int
    prefetched: int
    spliced: int
    again: int  # computed blocks that had been in this pool before
    waited_s: float = 0.0  # seconds between arrival and first scheduling
    hold: Hold | None = None  # how it was held during that wait; None: not held


class OtherParty(NamedTuple):
    """The session or engine, other than the request's own, that explains a miss: it has the missing
    block, or took its place. None if there is none.
    """

    session: str | None = None
    tenant: str | None = None
    engine: str | None = None


NOBODY: Final = OtherParty()


class RequestNames(Struct):
    """A request's names; ``finished`` is the reason of its end."""

    request: str
    engine: str
    session: str | None
    tenant: str | None
    other: OtherParty = NOBODY
    finished: str | None = None


UNHEARD: Final = "end_not_heard"
"""The end reason of a request without a reported end (yet). In place of its running time:"""
DOUBTED: Final = -1.0  # its engine lost events since; it runs, or its end was lost
LOST: Final = -2.0  # no longer awaited: its engine is gone, or it was in doubt too long
LIMIT: Final = 2_048  # requests; chosen: half a minute at seventy a second, hours of agents
_MOST_TOLD: Final = 65_535  # sessions; the most that two bytes hold
_WEIGHT: Final = 8 + 16 + 8 * 6 + 49  # bytes: a pointer, the record with six fields, its own string

_RECORD: Final = np.dtype(
    [
        ("at", "<f8"),  # time in the clock's seconds
        ("tokens", "<u4"),
        ("size", "<u2"),  # tokens per block
        ("asked", "<u4"),  # requested blocks
        ("pool", "<u4"),
        ("loaded", "<u4"),
        ("prefetched", "<u4"),
        ("spliced", "<u4"),  # tokens from other positions
        ("again", "<u4"),  # blocks computed that had been in this pool before
        ("index", "<u4"),  # index of the first missing block
        ("key", "<u8"),  # its key, the engine's; 0: no key
        ("eviction", "<i8"),  # its eviction's id; -1: none
        ("short", "<u4"),  # blocks evicted since
        ("ago", "<f4"),  # seconds before ``at`` when it left the pool; NaN: it did not
        ("ran", "<f4"),  # seconds that it ran; NaN: it runs; see UNHEARD
        ("same", "<u2"),  # leading tokens of the missing block that another prompt shares
        ("waited", "<f4"),  # seconds before it was scheduled
        ("held", "<f4"),  # of these, seconds until there was room for it
        ("until", "u1"),  # why it was released: 1 + index in HOLD_ENDS; 0: not held
        ("fitting", "<u2"),  # sessions that fit when it was held
        ("live", "<u2"),
        ("answer", "<u4"),  # tokens of the answer
        ("pause", "<f4"),  # the pause that its session announced then; NaN: none
        ("engine", "<u4"),  # a checksum of the engine's id, to compare it by column
        ("reason", "u1"),
        ("detail", "u1"),
    ]
)


_FORMATS: Final = {
    "<f4": "f",
    "<f8": "d",
    "<i8": "q",
    "<u2": "H",
    "<u4": "I",
    "<u8": "Q",
    "|u1": "B",
}
_PACKED: Final = Packing(  # the same, packed: a record costs a third
    "<" + "".join(_FORMATS[_RECORD[name].str] for name in _RECORD.names or ())
)
_AT: Final = Packing("<d")
_RAN: Final = Packing("<f")
_ANSWER: Final = Packing("<If")  # the answer, and the pause after it
_PLACES: Final = dict(_RECORD.fields or {})  # and its position in a record
_AT_PLACE, _RAN_PLACE, _ANSWER_PLACE = (_PLACES[name][1] for name in ("at", "ran", "answer"))


class Repeats(NamedTuple):
    """How requests fared that could have found cached blocks."""

    requests: int  # number of requests
    repeated: int  # of these, those that found nothing though they repeat a prompt or a session
    found: int  # blocks found
    asked: int  # full blocks of their prompts
    reason: Reason | None  # the most frequent reason for ``repeated``; None if there is none


class RequestLog:
    """A ring of requests.

    Ids count from 0 and never repeat; ``first`` is the oldest one still stored.
    """

    def __init__(self) -> None:
        self._ring = np.zeros(0, dtype=_RECORD)
        self._bytes = self._ring.data.cast("B")
        self._names: list[RequestNames] = []
        self._names_bytes = 0
        self._checksums: dict[str, int] = {}  # of engines' ids
        self.name = token_hex(4)
        self.next = 0

    @property
    def first(self) -> int:
        return max(0, self.next - LIMIT)

    @property
    def oldest(self) -> float:
        """Return when the oldest stored request began, in the clock's seconds."""
        return float(self.record(self.first)["at"])

    @property
    def nbytes(self) -> int:
        """Bytes of columns and name records, without strings shared with other owners."""
        return int(self._ring.nbytes) + self._names_bytes

    def add(self, names: RequestNames, asked: PromptBlocks, miss: Miss, now: float) -> int:
        """Add a scheduled request; returns its id."""
        number, slot = self.next, self.next % LIMIT
        if slot >= len(self._ring):
            self._ring = grown(self._ring, min(LIMIT, max(256, 2 * len(self._ring))))
            self._bytes = self._ring.data.cast("B")
        self._name(slot, names)
        self.next += 1
        _PACKED.pack_into(
            self._bytes, slot * _PACKED.size,
            now, asked.tokens, asked.size, asked.asked, asked.pool, asked.loaded,
            asked.prefetched, asked.spliced, asked.again, miss.index, miss.key, miss.eviction,
            miss.short, now - miss.left, nan, miss.same, asked.waited_s, *_packed(asked.hold),
            0, nan,
            self._checksum(names.engine), miss.reason, miss.detail,
        )  # fmt: skip
        names.other = _other(miss)
        return number

    def _name(self, slot: int, names: RequestNames) -> None:
        self._names_bytes += _WEIGHT + len(names.request)
        if slot < len(self._names):
            self._names_bytes -= _WEIGHT + len(self._names[slot].request)
            self._names[slot] = names
        else:
            self._names.append(names)

    def _checksum(self, engine: str) -> int:
        found = self._checksums.get(engine)
        if found is None:
            if len(self._checksums) >= MAX_ENGINES:
                self._checksums.clear()
            found = self._checksums[engine] = crc32(engine.encode())
        return found

    def judge(self, number: int, miss: Miss) -> None:
        """Record why a request missed; ignored if the request is no longer stored."""
        if not self.first <= number < self.next:
            return
        record, names = self._ring[number % LIMIT], self._names[number % LIMIT]
        for name in ("index", "key", "eviction", "short", "same", "reason", "detail"):
            record[name] = getattr(miss, name)
        record["ago"] = record["at"] - miss.left
        names.other = _other(miss)

    def finish(self, number: int, event: RequestFinished, now: float) -> None:
        """Record a request's end, the length of its answer, and the announced pause if any.

        The running time is the engine's own, if reported. A start and an end may arrive in one
        batch, so ``at`` plus ``ran`` may be later than the clock by that much.
        """
        if self.first <= number < self.next:
            slot, pause_s = number % LIMIT, event.expected_return_s
            self._names[slot].finished = event.reason
            start, answer = slot * _PACKED.size, max(0, event.total_tokens - event.prompt_tokens)
            ran_s = event.ran_s or now - _AT.unpack_from(self._bytes, start + _AT_PLACE)[0]
            _RAN.pack_into(self._bytes, start + _RAN_PLACE, ran_s)
            pause = nan if pause_s is None else pause_s
            _ANSWER.pack_into(self._bytes, start + _ANSWER_PLACE, answer, pause)

    def doubt(self, number: int) -> None:
        """Note that the report of a request's end may be lost; ``finish`` or ``lose`` follows."""
        self._end_unheard(number, DOUBTED)

    def lose(self, number: int) -> None:
        """Note that a request's end was not reported and is no longer awaited."""
        self._end_unheard(number, LOST)

    def _end_unheard(self, number: int, how: float) -> None:
        if self.first <= number < self.next:
            self._names[number % LIMIT].finished = UNHEARD
            start = number % LIMIT * _PACKED.size
            _RAN.pack_into(self._bytes, start + _RAN_PLACE, how)

    def is_awaited(self, number: int) -> bool:
        """Return whether a request's end may still be reported."""
        ran = float(self.record(number)["ran"])
        return isnan(ran) or ran == DOUBTED

    def hold(self, number: int) -> Hold | None:
        """Return how the request was held for room; None: it was not held."""
        record = self.record(number)
        if not record["until"]:
            return None
        reason = HOLD_ENDS[int(record["until"]) - 1]
        return Hold(float(record["held"]), reason, int(record["fitting"]), int(record["live"]))

    def held(self, engine: str, since: float) -> npt.NDArray[np.float32]:
        """Return the seconds for which requests begun after ``since`` were held, float32
        ``[n]``.
        """
        begun = self._begun(engine, since)
        found: npt.NDArray[np.float32] = begun["held"][begun["until"] > 0]
        return found

    def again(self, engine: str, since: float) -> int:
        """Return the number of blocks computed again by requests begun after ``since``."""
        return int(self._begun(engine, since)["again"].sum())

    def repeats(self, engine: str, since: float) -> Repeats:
        """Return how requests fared that began after ``since`` and could have found a block."""
        begun = self._begun(engine, since)
        could = begun[(begun["asked"] > 0) & (begun["reason"] != Reason.NOT_CACHEABLE)]
        found = could["pool"] + could["loaded"] + could["prefetched"]
        first = could[(found == 0) & (could["index"] == 0)]
        reasons = first["reason"][first["reason"] != Reason.NEVER_SEEN]
        most = Reason(int(np.bincount(reasons).argmax())) if len(reasons) else None
        return Repeats(len(could), len(reasons), int(found.sum()), int(could["asked"].sum()), most)

    def queued(self, engine: str, since: float) -> npt.NDArray[np.float32]:
        """Return the seconds that requests begun after ``since`` queued, without holding, float32
        ``[n]``.
        """
        begun = self._begun(engine, since)
        held = np.where(begun["until"] > 0, begun["held"], np.float32(0.0))
        found: npt.NDArray[np.float32] = begun["waited"] - held
        return found

    def _begun(self, engine: str, since: float) -> npt.NDArray[np.void]:
        theirs = self._ring["engine"] == crc32(engine.encode())
        found: npt.NDArray[np.void] = self._ring[theirs & (self._ring["at"] >= since)]
        return found

    def slowest(self, now: float) -> npt.NDArray[np.int64]:
        """Return all requests, int64 ``[n]``, those with the longest time since arrival first.
        Requests that run, or may, are counted up to ``now``; those whose end is lost, by their wait
        alone.
        """
        numbers = np.arange(self.first, self.next)
        ring = self.records(numbers)
        may_run = np.isnan(ring["ran"]) | (ring["ran"] == DOUBTED)
        ran = np.where(may_run, now - ring["at"], np.maximum(ring["ran"], 0.0))
        found: npt.NDArray[np.int64] = numbers[np.argsort(-(ring["waited"] + ran), kind="stable")]
        return found

    def record(self, number: int) -> Any:
        """Return one request's columns; its id must be at least ``first`` and below ``next``."""
        return self._ring[number % LIMIT]

    def missing(self, key: int) -> list[int]:
        """Return the requests whose first missing block has this key, oldest first."""
        found: list[int] = self._in(self._ring["key"] == np.uint64(key)).tolist()
        return found

    def ahead(self, number: int) -> npt.NDArray[np.int64]:
        """Return the requests first scheduled while this waited, int64 ``[n]``, oldest first."""
        ring, record = self._ring, self.record(number)
        begun = ring["at"] < record["at"]
        begun &= ring["at"] >= record["at"] - record["waited"]
        begun &= ring["engine"] == record["engine"]
        return self._in(begun)

    def under_way(self, number: int) -> npt.NDArray[np.int64]:
        """Return the requests that ran when this one arrived, int64 ``[n]``, oldest first."""
        ring, record = self._ring, self.record(number)
        arrived = record["at"] - record["waited"]
        there = ring["at"] < arrived
        there &= ring["engine"] == record["engine"]
        there &= ~(ring["at"] + ring["ran"] <= arrived)  # NaN: it runs
        return self._in(there)

    def records(self, numbers: npt.NDArray[np.int64]) -> Any:
        """Return the columns of these requests, copied; ids as for ``record``."""
        return self._ring[numbers % LIMIT]

    def _in(self, slots: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        taken = np.flatnonzero(slots)
        newest = self.next - 1 - (self.next - 1 - taken) % LIMIT
        return np.sort(newest[newest >= 0])

    def names(self, number: int) -> RequestNames:
        return self._names[number % LIMIT]


def _packed(hold: Hold | None) -> tuple[float, int, int, int]:
    if hold is None or hold.reason not in HOLD_ENDS:
        return 0.0, 0, 0, 0
    sessions = min(hold.fitting, _MOST_TOLD), min(hold.live, _MOST_TOLD)
    return hold.seconds, 1 + HOLD_ENDS.index(hold.reason), *sessions


def _other(miss: Miss) -> OtherParty:
    """The session and engine that a miss involves; ``NOBODY`` itself if there are none."""
    if miss.engine is None and miss.session == (None, None):
        return NOBODY
    return OtherParty(*miss.session, miss.engine)


MOST_BLOCKS: Final = 1 << 22  # blocks of all running requests: 17 MB; chosen
AWAITED_S: Final = 600.0  # how long the end of a request in doubt is awaited; chosen
_MOST_REQUESTS: Final = 65_536  # chosen
_AT_ONCE: Final = 2_048  # requests handled while the graph's lock is held once; chosen


class Running(Struct, frozen=True, gc=False):
    number: int  # its id in the request log
    engine: int
    rows: Rows
    session: str
    first: int = 0  # index in ``rows`` of the first block that it computes


class RunningRequests:
    """Running requests by engine column and request id, oldest first.

    An engine that lost events may have reported ends that never arrived. From then on its requests
    are in doubt, and overdue after ten minutes.
    """

    def __init__(self) -> None:
        self._running: dict[int, dict[str, Running]] = {}
        self._doubted: dict[int, dict[str, tuple[Running, float]]] = {}  # since when
        self._requests = self._blocks = 0
        self.nbytes = 0  # bytes of their rows

    def add(self, name: str, running: Running) -> None:
        self._running.setdefault(running.engine, {})[name] = running
        self._count(running, 1)

    def knows(self, engine: int, name: str) -> bool:
        """Return whether a request of this id is awaited."""
        return name in self._running.get(engine, ()) or name in self._doubted.get(engine, ())

    def pop(self, engine: int, name: str) -> Running | None:
        those = self._running.get(engine)
        running = those.pop(name, None) if those else None
        if running is None and engine in self._doubted:
            running, _ = self._doubted[engine].pop(name, (None, 0.0))
        if running is not None:
            self._count(running, -1)
        return running

    def doubt(self, engine: int, now: float) -> Iterator[int]:
        """Note that an engine lost events; yields the log ids of requests newly in doubt."""
        those = self._running.get(engine, {})
        for name in list(those):
            running = those.pop(name)
            self._doubted.setdefault(engine, {})[name] = running, now
            yield running.number

    def overdue(self, engine: int, now: float) -> list[str]:
        """Return the ids of some of the engine's requests that have been in doubt for too long."""
        doubted = self._doubted.get(engine)
        if not doubted:
            return []
        old = takewhile(lambda each: now - each[1][1] > AWAITED_S, doubted.items())
        return [name for name, _ in islice(old, _AT_ONCE)]

    def of(self, engine: int) -> list[str]:
        return [*self._doubted.get(engine, {}), *self._running.get(engine, {})]

    def computed(self, engine: int) -> Iterator[Rows]:
        """Yield the blocks computed by each of an engine's requests that are not in doubt."""
        for each in self._running.get(engine, {}).values():
            yield each.rows[each.first :]

    def surplus(self) -> tuple[int, str] | None:
        """Return the engine and id of the oldest request, if there are too many."""
        full = self._requests > _MOST_REQUESTS or self._blocks > MOST_BLOCKS
        if not full or self._requests <= 1:
            return None
        doubted = (each for those in self._doubted.values() for each in islice(those.items(), 1))
        oldest = [(running.number, running.engine, name) for name, (running, _) in doubted]
        certain = (each for those in self._running.values() for each in islice(those.items(), 1))
        oldest += [(running.number, running.engine, name) for name, running in certain]
        return min(oldest)[1:]

    def _count(self, running: Running, sign: int) -> None:
        self._requests += sign
        self._blocks += sign * len(running.rows)
        self.nbytes += sign * running.rows.nbytes


_STEPS: Final = 12.0  # steps per doubling, 6 % apart; chosen
_UNIT_S: Final = 0.1  # shorter durations are equal; 255 steps reach to 2.9 days; chosen
_TICK_S: Final = 0.01  # one tick; 2**32 ticks are 497 days; chosen

Bytes = npt.NDArray[np.uint8]


def as_byte(seconds: npt.NDArray[np.float64]) -> Bytes:
    """Encode durations on a logarithmic scale, uint8, 1 for 0 s; the inverse of ``seconds_of``."""
    steps = 1 + _STEPS * np.log2(1.0 + np.maximum(seconds, 0.0) / _UNIT_S)
    found: Bytes = np.minimum(np.rint(steps), 255).astype(np.uint8)
    return found


def seconds_of(byte: int) -> float | None:
    """Return the duration that ``as_byte`` encoded, within about 3 %; None for 0."""
    return None if not byte else float(_UNIT_S * (2 ** ((int(byte) - 1) / _STEPS) - 1))


class Origin:
    """The time from which a log counts, which is the first one it sees."""

    def __init__(self) -> None:
        self._first: float | None = None

    def ticks(self, now: float) -> int:
        """Return the hundredths of a second since the origin."""
        if self._first is None:
            self._first = now
        return int((now - self._first) / _TICK_S) & 0xFFFFFFFF

    def time(self, ticks: Any) -> float:
        """Return the time after this many ticks, in the clock's seconds."""
        return (self._first or 0.0) + float(ticks) * _TICK_S

    def times(self, ticks: npt.NDArray[np.uint32]) -> npt.NDArray[np.float64]:
        """Return the times after each of these numbers of ticks, in the clock's seconds, float64
        ``[n]``.
        """
        return np.asarray((self._first or 0.0) + self.seconds(ticks))

    @staticmethod
    def seconds(ticks: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """Return the duration of this many ticks, float64 ``[n]``."""
        return np.asarray(ticks.astype(np.float64) * _TICK_S)
