"""Reports what happens to an engine's blocks and requests, as events."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import compress, repeat
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from ...graph.types import PROTECTED_LAYERS
from ...graph.wire.events import (
    MAX_NAME,
    AnyEvent,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    Pressure,
    RequestFinished,
    RequestStarted,
    Segment,
)
from ..keys import GROUP_BYTES, key_of, pack_hashes, pack_keys, pack_run, unpack
from ..link.late import RecentPrompts, with_hashes
from ..requests.hints import (
    NO_HINTS,
    CheckedHints,
    HintReader,
    hint_policy,
    says_nothing,
    translate_hints,
)
from ..settings import engine_settings
from .core_index import changes_of
from .groups import ObservedGroup, first_named_token
from .index import BlockIndex
from .meters import PromptDemand
from .tap import CachedRun, Changes, PackedHashes, PoolTap, returned

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.request import Request

    from ..._engine import Batch
    from ..link.late import PromptDigests
    from ..link.outbox import Later
    from .core_index import CoreIndex, CoreTap

_Late = tuple[Sequence[CachedRun], PackedHashes, bool]


class LateChanges:
    """A step's changes before they are noted and reported; a ``Later`` of the outbox."""

    __slots__ = ("_changes", "_error", "_events", "_reporter", "_sessions")

    def __init__(
        self,
        runs: Sequence[CachedRun],  # blocks that were cached, in order
        changes: Changes,  # what was evicted, and whether the prefix cache was reset after that
        sessions: Sequence[str | None],  # of each run; none where no request has a session
        reporter: ChangeReporter,  # notes and tells them
    ) -> None:
        self._changes: _Late | None = runs, changes.evicted, changes.then_reset
        self._sessions = sessions
        self._reporter = reporter
        self._events: list[AnyEvent] | None = None
        self._error: Exception | None = None

    def note(self) -> None:
        """Note the changes in the index, once; never raises. If noting fails, the remaining blocks
        are missing from the index, and the step's events are lost.
        """
        changes, self._changes = self._changes, None
        if changes is None:
            return
        events: list[AnyEvent] = []
        try:
            events += self._reporter.events(*changes, self._sessions)
        except Exception as error:
            self._error = error
            self._reporter.failed()
        self._events = events

    def events(self) -> list[AnyEvent]:
        """Return the events of the noted changes, which the index contains from then on. Raises the
        error that stopped ``note``.
        """
        self._reporter.catch_up()  # in their order, also where older ones are never told
        events, self._events = self._events or [], []
        if self._error is not None:
            raise self._error
        return events


class ChangeReporter:
    """Notes changes in the index of blocks, and makes events of them. Runs in parallel with the
    engine's steps, so it reads only lists that steps append to: a request's hashes and blocks.
    """

    def __init__(
        self,
        group: ObservedGroup,  # the observed KV cache group
        index: BlockIndex,  # learns which block holds which key
        gone: Callable[[Sequence[int]], None],  # is told which keys the engine evicted
    ) -> None:
        self._scale, self._suffix, self._block_size = group.scale, group.suffix, group.block_size
        self._alone = group.groups_take == 1  # so every eviction is its own
        self._index = index
        self._gone = gone

    def catch_up(self) -> None:
        self._index.catch_up()

    def failed(self) -> None:
        self._index.doubt()

    def events(
        self,
        runs: Sequence[CachedRun],
        evicted: PackedHashes,
        then_reset: bool,
        sessions: Sequence[str | None],
    ) -> Iterator[AnyEvent]:
        if runs:
            yield from self._stored(runs, sessions or repeat(None))
        if evicted:
            yield from self._removed(runs, evicted)
        if then_reset:
            self._index.clear()
            yield BlocksCleared()

    def _stored(self, runs: Sequence[CachedRun], sessions: Iterable[str | None]) -> list[AnyEvent]:
        told = self._told(runs, sessions)
        keys = unpack(b"".join([event.hashes for event in told]))
        ids = [block.block_id for _, blocks, first, end in runs for block in blocks[first:end]]
        self._index.cached(keys, ids)
        return list(told)

    def _told(
        self, runs: Sequence[CachedRun], sessions: Iterable[str | None]
    ) -> list[BlocksStored]:
        scale, size, events = self._scale, self._block_size, list[BlocksStored]()
        for (hashes, _, first, end), session in zip(runs, sessions, strict=False):
            packed = pack_run(hashes, first, end, scale)
            parent = key_of(hashes[scale * first - 1]) if first else None
            events.append(BlocksStored(packed, parent, size, session))
        return events

    def _removed(self, runs: Sequence[CachedRun], evicted: PackedHashes) -> Iterator[AnyEvent]:
        """One event says all that left in the step, and others what came back in it."""
        of_ours = evicted if self._alone else evicted.of_group(self._suffix)
        keys = of_ours.keys.tolist()
        gone = self._index.forget(of_ours, keys)
        if gone:
            self._gone(gone)
        back = self._told(returned(runs, keys, gone, self._scale), repeat(None))
        if gone or back:
            yield BlocksRemoved(pack_keys(gone) + b"".join([event.hashes for event in back]))
        yield from back


_LONGEST_WAIT_S: Final = 86_400.0  # beyond, the arrival was dated by another clock; chosen


class Scheduled(NamedTuple):
    """A request that was scheduled and has not ended."""

    request: Request
    meaning: CheckedHints  # its caller's hints
    since: float  # when it was first scheduled, by the observer's clock
    stated: Sequence[int]  # keys that its caller states to be protected


def waited_s(request: Request) -> float:
    """Return the seconds since a request arrived, for display; 0 if the clock was set meanwhile.
    Uses the wall clock, since vLLM's API process dates arrivals by it.
    """
    waited = time.time() - request.arrival_time
    return waited if 0.0 < waited < _LONGEST_WAIT_S else 0.0


_SLICE: Final = 4096  # blocks per slice, between which the engine's thread can run; chosen


def resident_keys(pool: BlockPool, suffix: bytes) -> bytes:
    """Return the keys of all cached blocks of a group, packed, each once. Reads the pool's list of
    blocks, which never changes, in slices, so that the engine's thread can run in between.
    """
    hashes: set[bytes] = set()
    for start in range(0, len(pool.blocks), _SLICE):
        for block in pool.blocks[start : start + _SLICE]:
            block_hash = block.block_hash
            if block_hash is not None and block_hash.endswith(suffix):
                hashes.add(block_hash[:-GROUP_BYTES])
        time.sleep(0)
    return pack_hashes(list(hashes))


class ChangeListener(Protocol):
    """Is called within a step with the blocks that entered and left the prefix cache."""

    def changed(self, changes: Changes) -> None:
        """Note what a step cached and evicted, and whether the prefix cache was reset then."""


class EngineObserver:
    """Turns a scheduler's calls and a pool's changes into our events."""

    def __init__(
        self,
        pool: BlockPool,  # the live block pool
        group: ObservedGroup,  # the KV cache group to observe
        index: BlockIndex,  # learns which block holds which key
        # are told of changes in the step itself; all others learn of them later
        listeners: Sequence[ChangeListener],
        emit: Callable[[AnyEvent | Later], None],  # takes each event; must not wait
        *,
        # is told which keys a caller says are protected: as its request starts and ends
        stated: Callable[[Sequence[int], bool], None],
        # is told which keys follow from names (``first_named_token``), as they enter the prefix
        # cache; None: nobody asks
        named: Callable[[Sequence[int]], None] | None,
        # what to emit at a request's end, for what callers say of it
        ended: Callable[[RequestFinished, Request], AnyEvent | Later],
        # is told which keys the engine evicted, when that is worked through
        gone: Callable[[Sequence[int]], None],
        # keyed digests of a request's text, where it must be told apart from its salt
        contents: Callable[[Request], PromptDigests | None],
        # what to emit at its start, likewise
        began: Callable[[RequestStarted, Request], AnyEvent | Later],
        # which other group ended a lookup after a number of tokens
        lacking: Callable[[Request, int], int | None],
        clock: Callable[[], float] = time.monotonic,  # monotonic seconds
    ) -> None:
        self.stored = 0  # blocks, since the start
        self.hears_evictions = False  # whether a listener in the step itself wants them
        self._pool = pool
        self._group = group
        self._reporter = ChangeReporter(group, index, gone)
        self._index, self._listeners = index, listeners
        self._emit, self._stated, self._named = emit, stated, named
        self._ended, self._began, self._contents, self._lacking = ended, began, contents, lacking
        self._clock, self._recent = clock, RecentPrompts(group.block_size)
        self._tags = HintReader(hint_policy(engine_settings()))
        self._waiting: dict[str, tuple[int, int | None]] = {}  # by request id: the last lookup's
        self._meant: dict[str, CheckedHints] = {}  # of those whose meaning was asked for
        self.sessions: dict[str, str] = {}  # names of those that run, where no tenant has them
        self.running: dict[str, Scheduled] = {}  # by id, in the order in which they began

    # Requests -----------------------------------------------------------------------------------

    def request_queued(self, request: Request) -> None:
        self._waiting[request.request_id] = 0, None

    def meaning(self, request: Request) -> CheckedHints:
        """Return the caller's hints about a request that was not scheduled yet."""
        meaning = self._meant[request.request_id] = self._read(request)
        return meaning

    def request_looked_up(self, request: Request, cached_tokens: int) -> None:
        if request.request_id in self._waiting:
            lacking = self._lacking(request, cached_tokens)
            self._waiting[request.request_id] = cached_tokens, lacking

    def request_scheduled(self, request: Request, to_load: int = 0, spliced: int = 0) -> None:
        """Note that a request was given blocks: a load fills ``to_load`` tokens of them,
        ``spliced`` of these from other positions. Reported the first time only, not after a
        preemption.
        """
        if request.request_id in self.running:
            return
        prompt = request.num_prompt_tokens
        meaning = self._meant.pop(request.request_id, None) or self._read(request)
        hashes = self._group.hashes(request, prompt)
        stated = _protected(meaning.segments, hashes, self._group.block_size)
        self.running[request.request_id] = Scheduled(request, meaning, self._clock(), stated)
        if stated:
            self._stated(stated, False)
        if meaning.session is not None and meaning.tenant is None:  # a name is its tenant's
            self.sessions[request.request_id] = meaning.session
        found, lacking = self._waiting.pop(request.request_id, (0, None))
        event = RequestStarted(
            request_id=request.request_id[:MAX_NAME],
            hashes=b"",
            prompt_tokens=prompt,
            cached_tokens=found,
            block_size=self._group.block_size,
            session=meaning.session,
            tenant=meaning.tenant,
            segments=meaning.segments,
            loading_tokens=to_load,
            reads_cache=not getattr(request, "skip_reading_prefix_cache", False),
            waited_s=waited_s(request),
            spliced_tokens=spliced,
            lacking=lacking,
            warms=meaning.warming and request.max_tokens == 1,  # whatever a caller says of others
        )
        began, contents = self._began(event, request), self._contents(request)
        missing = (found + to_load) // self._group.block_size
        same = self._compared(request, hashes, missing)
        self._emit(with_hashes(began, hashes, contents, same))

    def request_finished(self, request: Request, block_ids: Sequence[Sequence[int]]) -> None:
        self._waiting.pop(request.request_id, None)
        self._meant.pop(request.request_id, None)
        if (known := self.running.pop(request.request_id, None)) is None:
            return  # aborted before it was ever scheduled: it touched no block
        meaning = known.meaning
        self.sessions.pop(request.request_id, None)
        event = RequestFinished(
            request_id=request.request_id[:MAX_NAME],
            hashes=b"",
            prompt_tokens=request.num_prompt_tokens,
            total_tokens=request.num_tokens,
            reason=request.status.name.lower(),
            session=meaning.session,
            tenant=meaning.tenant,
            waiting_for_tool=meaning.waiting_for_tool,
            expected_return_s=meaning.expected_return_s,
            session_ended=meaning.session_ended,
            tool=meaning.tool,
            ran_s=max(0.0, self._clock() - known.since),
        )
        hashes = self._give_back(request, block_ids[self._group.index])
        self._emit(with_hashes(self._ended(event, request), hashes))
        if known.stated:  # last: a ranking that knows of this time knows of the end
            self._stated(known.stated, True)

    def requests_preempted(self, request_ids: Iterable[str]) -> None:
        """Note that requests lost their blocks, and will be scheduled again."""
        for request_id in request_ids:
            if (known := self.running.get(request_id)) is not None:
                hashes = self._group.hashes(known.request, known.request.num_tokens)
                self._index.freed_without_a_word([each + self._group.suffix for each in hashes])

    def _compared(
        self, request: Request, hashes: Sequence[bytes], missing: int
    ) -> Callable[[], int] | None:
        """What compares a prompt with recent ones later; None if it has embeddings, not tokens."""
        tokens, recent = request.prompt_token_ids, self._recent
        return None if tokens is None else lambda: recent.add(tokens, hashes, missing)

    def _read(self, request: Request) -> CheckedHints:
        if says_nothing(request):
            return NO_HINTS
        return self._tags.read(
            request.kv_transfer_params,
            request.num_prompt_tokens,
            request.session_id,
            request.cache_salt,
            translate_hints(request),
        )

    def _give_back(self, request: Request, block_ids: Sequence[int]) -> Sequence[bytes]:
        """Date the request's cached blocks; returns their hashes."""
        hashes, blocks = self._group.hashes(request, request.num_computed_tokens), self._pool.blocks
        count = min(len(hashes), len(block_ids))
        while count and blocks[block_ids[count - 1]].block_hash is None:
            count -= 1  # full, but not in the prefix cache: the request ended before
        self._index.freed(block_ids[:count])
        return hashes if count == len(hashes) else hashes[:count]

    def blocks_changed(self, changes: Changes) -> int:
        """Queue what a step cached and evicted; returns how many blocks of any group it evicted."""
        cached, names = changes.cached, self.sessions
        sessions = [names.get(run[0].request_id) for run in cached] if names else ()
        runs: list[CachedRun] = []
        for request, blocks, first, end in cached:
            hashes = request.block_hashes
            # vLLM adds to its list, and shortens it where more input is streamed.
            runs.append((list(hashes) if request.resumable else hashes, blocks, first, end))
            self.stored += end - first
            self._note_named(request, first, end)
        late = LateChanges(runs, changes, sessions, self._reporter)
        self._index.late.add(late.note)
        self._emit(late)
        for listener in self._listeners:
            listener.changed(changes)
        return len(changes.evicted)

    def batch_taken(self, batch: Batch) -> None:
        """Queue the changes that a compiled core noted in a step, as ``blocks_changed`` does."""
        self._emit(batch)
        if not (batch.is_special or batch.then_reset or self.hears_evictions):
            return
        changes = changes_of(batch)
        for request, _, first, end in changes.cached:
            self._note_named(request, first, end)
        for listener in self._listeners:
            listener.changed(changes)

    def _note_named(self, request: Request, first: int, end: int) -> None:
        if self._named is None or (token := first_named_token(request)) is None:
            return
        group = self._group
        if (first := max(first, token // group.block_size)) < end:
            self._named(unpack(pack_run(request.block_hashes, first, end, group.scale)))

    # Asked from the client's thread -------------------------------------------------------------

    def resident(self) -> bytes:
        """Return the keys of all cached blocks, packed, each once.

        Reads the pool's list of blocks, which never changes, in slices, so that the engine's thread
        can run in between. Blocks that change meanwhile are corrected by the events queued since.
        """
        return resident_keys(self._pool, self._group.suffix)

    def pressure(self) -> Pressure:
        return Pressure(
            total_blocks=self._pool.num_gpu_blocks - 1,  # without the null block
            free_blocks=self._pool.get_num_free_blocks(),
            cached_blocks=len(self._pool.cached_block_hash_to_block),
            running=len(self.running),
            waiting=len(self._waiting),
        )


def _protected(segments: Sequence[Segment], hashes: Sequence[bytes], size: int) -> Sequence[int]:
    """Keys of the blocks of ``size`` tokens that a caller's segments protect, from the prompt's
    start on, each once.
    """
    if not segments:
        return ()
    covered = bytearray(len(hashes))  # a thousand segments may name the same blocks
    for segment in segments:
        if segment.layer in PROTECTED_LAYERS:
            first, end = segment.start // size, min(-(-segment.end // size), len(hashes))
            covered[first:end] = b"\1" * max(0, end - first)
    return list(map(key_of, compress(hashes, covered)))


class ChangeFeed:
    """Passes a pool's changes to the parts that follow them."""

    def __init__(self, tap: PoolTap, observer: EngineObserver, demand: PromptDemand) -> None:
        self._tap = tap
        self._observer = observer
        self._demand = demand

    @property
    def stored(self) -> int:
        return self._observer.stored

    def take(self) -> int:
        """Pass on the changes since the last call. Returns how many blocks were evicted, since the
        last reset if there was one.
        """
        evicted = 0
        for changes in self._tap.take():
            evicted = self._observer.blocks_changed(changes)
            self._demand.cached(changes.cached)
            if changes.then_reset:
                evicted = 0
        return evicted


class CoreFeed(ChangeFeed):
    """A ``ChangeFeed`` for the changes that a compiled core notes."""

    def __init__(
        self,
        tap: CoreTap,  # asks the core
        observer: EngineObserver,  # reports the changes
        demand: PromptDemand,  # learns what was computed
        index: CoreIndex,  # of the same core
    ) -> None:
        super().__init__(tap, observer, demand)
        self._core_tap, self._index = tap, index
        tap.sessions = observer.sessions

    @property
    def stored(self) -> int:
        return self._index.core.stored

    def take(self) -> int:
        evicted = 0
        while (batch := self._core_tap.next()) is not None:
            evicted = 0 if batch.then_reset else batch.evicted
            self._observer.batch_taken(batch)
            self._index.taken()
        return evicted
