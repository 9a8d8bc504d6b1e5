"""The history of requests and evictions, which ingest records beside the tables."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import add
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from ..compiled import core
from ..tables.tables import Tables
from ..types import NO_ROW, BlockFlag, Keys, Rows, as_keys
from .departures import Departures
from .evictions import EvictionLog, RowMark
from .misses import OpenCase, OpenCases, apart, missed, named
from .reasons import REASON_NAMES, Reason
from .requests import Hold, Miss, PromptBlocks, RequestLog, RequestNames, Running, RunningRequests

if TYPE_CHECKING:
    from ..wire.events import RequestFinished, RequestStarted

MOST_BLOCKS: Final = 1 << 20  # blocks of all waiting walks: 12 MB; chosen
_MOST_WALKS: Final = 65_536  # waiting walks; chosen


class ReplayedWalk(Struct, frozen=True, gc=False):
    """A request's start or end, as replayed in simulated caches."""

    engine: int
    session: str  # the tenant's and the session's names, joined
    rows: Rows  # int32, the chain's block rows; ``keys`` are their graph keys at that time
    keys: Keys
    # How many of them a prefix match could cover; at the request's end, how many belong to the
    # prompt.
    reach: int
    found: int  # how many of them were in the pool; -1 at the request's end
    tokens: int  # prompt tokens; at the request's end, prompt and answer
    at: float
    loaded: int = 0  # further blocks to be loaded from a colder tier
    size: int = 0  # tokens per block; 0: unknown


class ReplayQueue:
    """Starts and ends of requests that wait to be replayed in simulated caches."""

    # Beyond these limits, the oldest are dropped.

    def __init__(self) -> None:
        self._walks: deque[ReplayedWalk] = deque()
        self._blocks = 0
        self.nbytes = 0  # bytes of the queued rows and keys

    def add(self, walk: ReplayedWalk) -> None:
        self._walks.append(walk)
        self._count(walk, 1)
        while len(self._walks) > (1 if self._blocks > MOST_BLOCKS else _MOST_WALKS):
            self._count(self._walks.popleft(), -1)

    def take(self) -> list[ReplayedWalk]:
        """Remove and return all walks, the oldest first."""
        taken = list(self._walks)
        self._walks.clear()
        self._blocks = self.nbytes = 0
        return taken

    def _count(self, walk: ReplayedWalk, sign: int) -> None:
        self._blocks += sign * len(walk.rows)
        self.nbytes += sign * (walk.rows.nbytes + walk.keys.nbytes)


_BITS: Final = 17  # bits of a slot's number; chosen: 3.1 MB
Slots = npt.NDArray[np.int64]
_SLOT: Final = np.dtype([("content", "<u8"), ("key", "<u8"), ("salt", "<u8")])


class ContentIndex:
    """Finds a block with the same content under another cache salt.

    Contents and salts are digests (see ``ContentKey``), keys are the graph's. Each content may be
    in one of two slots; if others occupy both, one is overwritten. No memory is used before the
    first content.
    """

    def __init__(self) -> None:
        self._slots = np.zeros(0, dtype=_SLOT)

    @property
    def nbytes(self) -> int:
        return int(self._slots.nbytes)

    def add(self, contents: Keys, keys: Keys, salt: int) -> None:
        """Store that block ``keys[i]``, the graph's uint64 key, has the content ``contents[i]``, a
        uint64 digest of its tokens, under the cache salt with digest ``salt``.
        """
        if not len(self._slots):
            self._slots = np.zeros(1 << _BITS, dtype=_SLOT)
        first, second = _slots_of(contents)
        there = self._slots["content"][first]
        at = np.where((there == 0) | (there == contents), first, second)
        self._slots["content"][at], self._slots["key"][at] = contents, keys
        self._slots["salt"][at] = np.uint64(salt)

    def elsewhere(self, content: np.uint64, salt: int) -> int | None:
        """Return the graph key of a block with this content under another salt; None: unknown."""
        if not len(self._slots):
            return None
        for at in _slots_of(np.array([content], dtype=np.uint64)):
            slot = self._slots[at[0]]
            if slot["content"] == content and slot["salt"] != np.uint64(salt):
                return int(slot["key"])
        return None


def _slots_of(contents: Keys) -> tuple[Slots, Slots]:
    """A content's two slots: its low bits and the next ones, as digests are as good as random."""
    mask, bits = np.uint64((1 << _BITS) - 1), np.uint64(_BITS)
    return (contents & mask).astype(np.int64), ((contents >> bits) & mask).astype(np.int64)


Sums = npt.NDArray[np.int64]
_TOP: Final = np.iinfo(np.uint32).max


class StepSums:
    """Sums of counts by name, for the last ``steps`` time steps of ``step_s`` seconds each."""

    def __init__(self, columns: Sequence[str], step_s: float, steps: int) -> None:
        self.columns = tuple(columns)
        self.step_s = step_s
        self._steps = steps
        self._sums = np.zeros((0, len(self.columns)), dtype=np.uint32)
        self._step: int | None = None  # the newest
        self._begun = 0  # steps since the first that was counted
        self._open: int | None = None  # the step of what is not in ``_sums`` yet
        self._now = -math.inf  # a time in it
        self._pending = [0] * len(self.columns)

    @property
    def nbytes(self) -> int:
        return int(self._sums.nbytes)

    def add(self, counts: Sequence[int], now: float) -> None:
        """Add counts to the step of ``now``; times before the oldest step count in that step."""
        if now != self._now:
            self._begin(now)
        pending = self._pending
        for place, count in enumerate(counts):
            pending[place] += count

    def add_to(self, place: int, count: int, now: float) -> None:
        """Add to one column, given its index."""
        if now != self._now:
            self._begin(now)
        self._pending[place] += count

    def _begin(self, now: float) -> None:
        step = int(now // self.step_s)
        if step != self._open:
            self._settle()
            self._open = step
        self._now = now

    def _settle(self) -> None:
        """Add pending counts to their step."""
        step, self._open, self._now = self._open, None, -math.inf
        if step is None:
            return
        newest = self._advance(step)
        step = max(step, newest - self._steps + 1)
        self._begun = max(self._begun, newest - step + 1)
        # A few requests may claim as many tokens as a column holds: it stays at its top.
        sums = self._sums[step % self._steps]
        sums[:] = np.minimum(sums + np.array(self._pending, dtype=np.int64), _TOP)
        self._pending = [0] * len(self.columns)

    def last(self, seconds: float, now: float) -> dict[str, int]:
        """Return column → sum over the steps that began in the last ``seconds``."""
        starts, sums = self.series(now)
        total = sums[np.array(starts) > now - seconds].sum(axis=0) if starts else sums.sum(axis=0)
        return dict(zip(self.columns, total.tolist(), strict=True))

    def series(self, now: float) -> tuple[list[float], Sums]:
        """Return the starts and sums of every stored step up to ``now``, oldest first."""
        self._settle()
        if self._step is None:
            return [], np.zeros((0, len(self.columns)), dtype=np.int64)
        newest = max(self._step, int(now // self.step_s))
        count = min(self._begun + newest - self._step, self._steps)
        steps = np.arange(newest - count + 1, newest + 1)
        sums = self._sums[steps % self._steps].astype(np.int64)
        sums[steps > self._step] = 0  # nothing was counted in them yet
        return (steps * self.step_s).tolist(), sums

    def series_by_name(self, now: float) -> tuple[list[float], dict[str, Sums]]:
        """Return the starts of the steps, and column → its sums."""
        starts, sums = self.series(now)
        return starts, dict(zip(self.columns, sums.T, strict=True))

    def merged(self, now: float, most: int) -> tuple[float, list[float], dict[str, Sums]]:
        """Merge adjacent steps of ``series_by_name`` until about ``most`` are left; returns the
        seconds of a merged step, each step's start, and its sums by column.
        """
        starts, sums = self.series(now)
        many = 1 << (max(1, -(-len(starts) // most)) - 1).bit_length()
        step_s = many * self.step_s
        steps, firsts = np.unique(np.array(starts) // step_s, return_index=True)
        if len(starts):
            sums = np.add.reduceat(sums, firsts, axis=0)
        return step_s, (steps * step_s).tolist(), dict(zip(self.columns, sums.T, strict=True))

    def _advance(self, step: int) -> int:
        """Begin steps up to ``step``, each at zero; returns the newest."""
        if self._step is None:
            self._sums = np.zeros((self._steps, len(self.columns)), dtype=np.uint32)
            self._step, self._begun = step, 1
        fresh = min(step - self._step, self._steps)
        if fresh > 0:
            self._sums[np.arange(step - fresh + 1, step + 1) % self._steps] = 0
            self._begun += step - self._step
            self._step = step
        return self._step


WINDOW_S: Final = 600.0
"""Seconds within which an evicted block must be requested again for its eviction to count as
regretted; chosen, as long as a session counts as live.
"""

TOKEN_COLUMNS: Final = ("requests", "asked", "pool", "loaded", "prefetched")
REASON_COLUMNS: Final = tuple(
    f"{what}_{name}" for what in ("requests", "blocks") for name in REASON_NAMES
)
_REASONS: Final = len(REASON_NAMES)
MINUTE_COLUMNS: Final = ("asked", "asked_blocks", "found", "evicted", "wanted")
LOST_WAYS: Final = ("multi_turn", "cross_session")
_REQUESTS: Final = 32  # an engine's running requests per slice; chosen
_BUCKETS: Final = 32  # powers of two of blocks; chosen


class History(Departures):
    """Logs requests beside departures: what they requested and found, and why they missed."""

    def __init__(self, tables: Tables) -> None:
        super().__init__(tables)
        self.given = [0] * len(TOKEN_COLUMNS)  # sums of ``tokens`` since the start
        self._told: list[tuple[int, ...]] = []  # of requests that started, until ``all_told``
        self._asked: Counter[int] = Counter()  # tokens, by engine
        self._found: Counter[int] = Counter()
        self.running = RunningRequests()  # requests whose end is awaited
        self._heard: ReplayQueue | None = None  # no listener yet
        self.requests = RequestLog()  # the log of requests of all engines
        # Running requests that miss a block which the tables say is in the pool; judged again once
        # their step's evictions are reported.
        self.open_cases = OpenCases(tables, self.evictions, self._closed, self.requests.judge)
        self.contents = ContentIndex()  # prompt contents, where callers use cache salts
        # Prompt tokens, in steps of ten seconds for four hours.
        self.tokens = StepSums(TOKEN_COLUMNS, 10.0, 1440)
        # Requests and computed blocks by reason, in steps of a minute for twelve hours.
        self.reasons = StepSums(REASON_COLUMNS, 60.0, 720)
        # In steps of a minute for twelve hours: prompt tokens, full prompt blocks, tokens found,
        # blocks evicted, and evicted blocks requested again.
        self.minutes = StepSums(MINUTE_COLUMNS, 60.0, 720)
        # Sums of ``reasons`` since the start.
        self.totals = [0] * len(REASON_COLUMNS)
        # Blocks computed again, in the session's own turns or in shared prefixes (``LOST_WAYS``).
        self.lost = np.zeros(len(LOST_WAYS), dtype=np.int64)
        # The same, by powers of two of the number of blocks evicted between a block's eviction and
        # its return, which is by how much the pool was too small for it.
        self.beyond = np.zeros((len(LOST_WAYS), _BUCKETS), dtype=np.int64)

    @property
    def nbytes(self) -> int:
        """Bytes of all logs; may be read without the graph's lock."""
        evictions = sum(log.nbytes for log in list(self.evictions.values()))
        heard = self._heard.nbytes if self._heard is not None else 0
        others = self.requests, self.tokens, self.reasons, self.minutes, self.contents, self.running
        return evictions + heard + self.copies.nbytes + sum(each.nbytes for each in others)

    def asked(self, now: float) -> dict[float, int]:
        """Return the start of each step of ``tokens`` → prompt tokens in that step."""
        starts, sums = self.tokens.series_by_name(now)
        return dict(zip(starts, sums["asked"].tolist(), strict=True))

    def hit_share(self, engine: str) -> float | None:
        """Return an engine's share of prompt tokens found since it connected; None before any."""
        column = self._tables.engines.get(engine, NO_ROW)
        asked = self._asked[column]
        return self._found[column] / asked if asked else None

    def greeting(self, engine: int, now: float) -> Iterator[None]:
        """Handle an engine's hello, in slices: reported ends of its requests may have been lost. A
        request that still runs is closed when its end is reported within ten minutes.
        """
        self.arrived(engine)
        self.stop_computing_all(engine)
        for count, number in enumerate(self.running.doubt(engine, now), start=1):
            self.requests.doubt(number)
            if count % _REQUESTS == 0:
                yield

    def await_no_overdue(self, engine: int, now: float) -> None:
        """Stop waiting for the ends of requests that have been in doubt for too long."""
        for name in self.running.overdue(engine, now):
            self._await_no_more(engine, name)

    def forgetting(self, engine: int) -> Iterator[None]:
        """Forget an engine that is gone, in slices; its requests stay in the log."""
        self.stop_computing_all(engine)
        for count, name in enumerate(self.running.of(engine), start=1):
            self._await_no_more(engine, name)
            if count % _REQUESTS == 0:
                yield
        self.forget(engine)
        self._asked.pop(engine, None)
        self._found.pop(engine, None)

    def evicted(self, engine: int, rows: Rows, now: float) -> None:
        super().evicted(engine, rows, now)
        if len(rows):
            self.minutes.add((0, 0, 0, len(rows), 0), now)

    def started(
        self, engine: int, event: RequestStarted, session: int, rows: Rows, keys: Keys, now: float,
        hold: Hold | None = None,
    ) -> None:  # fmt: skip
        """Record that a request was scheduled, and how long it was held; ``keys`` are the graph
        keys of its ``rows``. Must be called before its session and blocks are updated; call
        ``all_told`` before the records are read.
        """
        if self.running.knows(engine, event.request_id):
            self._drop(engine, event.request_id)
        log, size = self._log(engine), event.block_size
        reach = min(len(rows), max(0, event.prompt_tokens - 1) // size)
        found = min(event.cached_tokens // size, len(rows))
        loaded = min(event.loading_tokens // size, len(rows) - found)
        prefetched, known, mark, facts = core.marked(
            log.marks, self._tables.blocks, engine, rows, found, found + loaded, reach,
            RowMark.PREFETCHED, RowMark.MASK, RowMark.COMPUTING,
        )  # fmt: skip
        again, short = 0, 0
        if known:
            again, short = self._again(log, session, np.frombuffer(known, np.int32), now)
        spliced = min(event.spliced_tokens // size, loaded)
        counts = len(rows), found - prefetched, loaded - spliced, prefetched, spliced, again
        asked = PromptBlocks(event.prompt_tokens, size, *counts, event.waited_s, hold)
        miss = missed(
            self._tables, self.evictions, engine, event, session, rows, found + loaded, mark, facts,
            now,
        )  # fmt: skip
        if event.contents:
            miss = self._by_content(engine, event, rows, miss)
        if short:
            miss = miss.keeping_all(short)
        names = self._names(engine, event, session)
        number = self.requests.add(names, asked, miss, now)
        whose = f"{names.tenant or ''}\n{names.session}"
        self.running.add(event.request_id, Running(number, engine, rows, whose, found + loaded))
        self._record_walk(
            engine, whose, rows, keys, max(reach, found), found, asked.tokens, now, loaded, size
        )
        while (surplus := self.running.surplus()) is not None:  # their ends were never reported
            self._drop(*surplus)
        given = (1, asked.tokens, asked.pool * size, loaded * size, prefetched * size)
        self._told.append((*given, len(rows), (found + loaded) * size))
        computed = max(0, reach - found - loaded)
        if self.open_cases.is_open(engine, miss, rows):
            self.open_cases.add(number, engine, miss, int(rows[miss.index]), computed, short, now)
        else:
            self._count(miss, computed, now)

    def all_told(self, engine: int, now: float) -> None:
        """Add up what the requests passed to ``started`` since the last call asked for and found;
        they must all be of one engine and time.
        """
        if not self._told:
            return
        *given, blocks, found = map(sum, zip(*self._told, strict=True))
        self._told.clear()
        self._found[engine] += found
        self._asked[engine] += given[1]
        self.tokens.add(given, now)
        self.minutes.add((given[1], blocks, found, 0, 0), now)
        self.given = list(map(add, self.given, given))

    def finished(
        self, engine: int, event: RequestFinished, rows: Rows, keys: Keys, now: float
    ) -> None:
        if (running := self.running.pop(engine, event.request_id)) is None:
            return
        if self.open_cases.awaits(engine):
            self.open_cases.drop(engine, running.number)
        self._comes_no_more(engine, running)
        self._record_walk(
            engine, running.session, rows, keys, len(running.rows), -1, event.total_tokens, now
        )
        self.requests.finish(running.number, event, now)

    def _drop(self, engine: int, name: str) -> None:
        """Stop awaiting a request's end, if it was awaited."""
        running = self._await_no_more(engine, name)
        if running is not None:
            self._comes_no_more(engine, running)

    def _await_no_more(self, engine: int, name: str) -> Running | None:
        """``_drop`` for a request whose blocks are known not to come; returns it."""
        running = self.running.pop(engine, name)
        if running is not None:
            self.requests.lose(running.number)
            if self.open_cases.awaits(engine):
                self.open_cases.drop(engine, running.number)
        return running

    def _comes_no_more(self, engine: int, running: Running) -> None:
        """Note that a request computes no block any longer."""
        computed = running.rows[running.first :]
        self.stop_computing(engine, computed, self.running.computed(engine))

    def listen(self) -> list[ReplayedWalk]:
        """Return requests' starts and ends since the last call; the first call begins."""
        if self._heard is None:
            self._heard = ReplayQueue()
        return self._heard.take()

    def _record_walk(
        self, engine: int, session: str, rows: Rows, keys: Keys, reach: int, found: int,
        tokens: int, now: float, loaded: int = 0, size: int = 0,
    ) -> None:  # fmt: skip
        if self._heard is not None:
            self._heard.add(
                ReplayedWalk(engine, session, rows, keys, reach, found, tokens, now, loaded, size)
            )

    def _again(self, log: EvictionLog, session: int, rows: Rows, now: float) -> tuple[int, int]:
        """Count blocks computed again after being in this pool."""
        # Also returns by about how many blocks the pool was too small to keep those that the log
        # remembers.
        blocks = self._tables.blocks
        own = (blocks.session[rows] == session) & (session != NO_ROW)
        own &= (blocks.flags[rows] & int(BlockFlag.SHARED)) == 0
        ids = log.find(rows, blocks.keys[rows])
        known = ids >= log.first
        for way, mine in enumerate((own, ~own)):
            self.lost[way] += np.count_nonzero(mine)
            since = log.next - ids[mine & known]
            bucket = np.minimum(np.ceil(np.log2(since)).astype(np.int64), _BUCKETS - 1)
            self.beyond[way] += np.bincount(bucket, minlength=_BUCKETS)
        regretted = log.note_wanted(ids[known], now, WINDOW_S)
        self.minutes.add((0, 0, 0, 0, len(regretted)), now)
        return len(rows), int((log.next - ids[known]).max(initial=0))

    def _closed(self, case: OpenCase) -> None:
        """Count a miss that could not be judged at once."""
        self._count(case.miss, case.computed, case.at)

    def _count(self, miss: Miss, computed: int, now: float) -> None:
        """Count one request by its reason, and the blocks that it computes."""
        requests, blocks = int(miss.reason), _REASONS + int(miss.reason)
        self.reasons.add_to(requests, 1, now)
        self.reasons.add_to(blocks, computed, now)
        self.totals[requests] += 1
        self.totals[blocks] += computed

    def _by_content(self, engine: int, event: RequestStarted, rows: Rows, miss: Miss) -> Miss:
        """The same miss, or one by the salt if another salt's block has the content."""
        if len(event.contents) != 8 * len(rows):
            return miss
        told = as_keys(event.contents) ^ self._tables.salt(engine)
        if miss.reason in (Reason.NEVER_SEEN, Reason.DIVERGED):
            key = self.contents.elsewhere(told[miss.index], event.salt)
            miss = miss if key is None else apart(self._tables, miss, key)
        self.contents.add(told, self._tables.blocks.keys[rows], event.salt)
        return miss

    def _names(self, engine: int, event: RequestStarted, session: int) -> RequestNames:
        name = self._tables.name_of(engine) or "?"
        return RequestNames(event.request_id, name, *named(self._tables, session))


class NoHistory(History):
    """A history of nothing, where logs are not used: it saves a tenth of ingest's time."""

    def evicted(self, engine: int, rows: Rows, now: float) -> None:
        pass

    def started(
        self, engine: int, event: RequestStarted, session: int, rows: Rows, keys: Keys, now: float,
        hold: Hold | None = None,
    ) -> None:  # fmt: skip
        pass

    def finished(
        self, engine: int, event: RequestFinished, rows: Rows, keys: Keys, now: float
    ) -> None:
        pass


@dataclass(slots=True)
class LoggedTables(Tables):
    """The graph's tables with the history of requests and evictions."""

    history: History = field(init=False)

    def __post_init__(self) -> None:
        Tables.__post_init__(self)  # with slots, ``super()`` names a class that is no base
        self.history = History(self) if self.limits.logs else NoHistory(self)
