"""Reports what happens to an engine's blocks and requests, as events."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from ....graph.messages.events import AnyEvent, Pressure, RequestFinished, RequestStarted
from ....graph.messages.fields import MAX_NAME
from ....graph.types import PROTECTED_LAYERS
from ...keys import key_of, pack_run, unpack
from ...link.late_events import LateHashes
from ...link.recent_prompts import LatePrompt, RecentPrompts
from ..hints.hint_policy import hint_policy
from ..hints.tags import Meaning, TagReader
from ..pool.index import BlockIndex
from ..pool.tap import CachedRun, Changes
from .group import ObservedGroup
from .late_changes import ChangeReporter, LateChanges
from .resident import resident_keys
from .running import Scheduled, waited_s

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.request import Request

    from ...link.outbox import Later
    from ...link.prompt_digests import PromptDigests


class ChangeListener(Protocol):
    """Is told in the step itself what entered and left the prefix cache."""

    def changed(self, changes: Changes) -> None:
        """Note what a step cached and evicted, and whether the prefix cache was reset then."""


class EngineObserver:
    """Turns a scheduler's calls and a pool's changes into our events.

    Args:
        pool: The live block pool.
        group: The KV cache group to observe.
        index: Learns which block holds which key.
        listeners: Are told of changes in the step itself; all others learn of them later.
        emit: Takes each event; must not wait.
        stated: Is told which keys a caller says are protected: as its request starts and ends.
        adapted: Is told which keys a LoRA adapter computed, as they enter the prefix cache.
        ended: What to emit at a request's end, for what callers say of it.
        gone: Is told which keys the engine evicted, when that is worked through.
        contents: What a request says, where that is to be told apart from its salt.
        began: What to emit at its start, likewise.
        lacking: Which other group ended a lookup after so many tokens.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        pool: BlockPool,
        group: ObservedGroup,
        index: BlockIndex,
        listeners: Sequence[ChangeListener],
        emit: Callable[[AnyEvent | Later], None],
        *,
        stated: Callable[[Sequence[int], bool], None],
        adapted: Callable[[Sequence[int]], None],
        ended: Callable[[RequestFinished, Request], AnyEvent | Later],
        gone: Callable[[Sequence[int]], None],
        contents: Callable[[Request], PromptDigests | None],
        began: Callable[[RequestStarted, Request], AnyEvent | Later],
        lacking: Callable[[Request, int], int | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stored = 0  # blocks, since the start
        self._pool = pool
        self._group = group
        self._reporter = ChangeReporter(group, index, gone)
        self._index, self._listeners = index, listeners
        self._emit, self._stated, self._adapted = emit, stated, adapted
        self._ended, self._began, self._contents, self._lacking = ended, began, contents, lacking
        self._clock, self._recent = clock, RecentPrompts(group.block_size)
        self._tags = TagReader(hint_policy(os.environ))
        self._waiting: dict[str, tuple[int, int | None]] = {}  # by request id: the last lookup's
        self._meant: dict[str, Meaning] = {}  # of those whose meaning was asked for
        self._sessions: dict[str, str] = {}  # names of those that run, where no tenant has them
        self.running: dict[str, Scheduled] = {}  # by id, in the order in which they began

    # Requests -----------------------------------------------------------------------------------

    def request_queued(self, request: Request) -> None:
        """Note that a request arrived."""
        self._waiting[request.request_id] = 0, None

    def meaning(self, request: Request) -> Meaning:
        """What the caller says about a request that was not scheduled yet."""
        meaning = self._meant[request.request_id] = self._read(request)
        return meaning

    def request_looked_up(self, request: Request, cached_tokens: int) -> None:
        """Note that the prefix cache holds the request's first ``cached_tokens`` tokens."""
        if request.request_id in self._waiting:
            lacking = self._lacking(request, cached_tokens)
            self._waiting[request.request_id] = cached_tokens, lacking

    def request_scheduled(self, request: Request, to_load: int = 0, spliced: int = 0) -> None:
        """Note that a request got blocks; reported the first time only, not after a preemption.

        Args:
            to_load: Tokens of them that a load fills.
            spliced: Of these, those that come from other positions.
        """
        if request.request_id in self.running:
            return
        prompt = request.num_prompt_tokens
        meaning = self._meant.pop(request.request_id, None) or self._read(request)
        self.running[request.request_id] = Scheduled(request, meaning, self._clock())
        hashes = self._group.hashes(request, prompt)
        self._state(meaning, hashes, is_over=False)
        if meaning.session is not None and meaning.tenant is None:  # a name is its tenant's
            self._sessions[request.request_id] = meaning.session
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
        late = _late_prompt(self._recent, request, (found + to_load) // self._group.block_size)
        self._emit(LateHashes(began, hashes, contents, late))

    def request_finished(self, request: Request, block_ids: Sequence[Sequence[int]]) -> None:
        """Note that a request ended, and that its blocks are about to be freed."""
        self._waiting.pop(request.request_id, None)
        self._meant.pop(request.request_id, None)
        if (known := self.running.pop(request.request_id, None)) is None:
            return  # aborted before it was ever scheduled: it touched no block
        meaning = known.meaning
        self._sessions.pop(request.request_id, None)
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
        self._emit(LateHashes(self._ended(event, request), hashes))
        if meaning.segments:  # last: a ranking that knows of this time knows of the end
            prompt = self._group.hashes(request, request.num_prompt_tokens)
            self._state(meaning, prompt, is_over=True)

    def _state(self, meaning: Meaning, hashes: Sequence[bytes], is_over: bool) -> None:
        for keys in _protected(meaning, hashes, self._group.block_size):
            self._stated(keys, is_over)

    def requests_preempted(self, request_ids: Iterable[str]) -> None:
        """Note that requests lost their blocks, which can be evicted now, and will be scheduled
        again."""
        for request_id in request_ids:
            if (known := self.running.get(request_id)) is not None:
                hashes = self._group.hashes(known.request, known.request.num_tokens)
                self._index.freed_without_a_word([each + self._group.suffix for each in hashes])

    def _read(self, request: Request) -> Meaning:
        return self._tags.read(
            request.kv_transfer_params,
            request.num_prompt_tokens,
            request.session_id,
            request.cache_salt,
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
        cached, names = changes.cached, self._sessions
        sessions = [names.get(run[0].request_id) for run in cached] if names else ()
        runs: list[CachedRun] = []
        for request, blocks, first, end in cached:
            runs.append((_hashes_for_later(request), blocks, first, end))
            self.stored += end - first
            if request.lora_request is not None:
                self._note_adapted(request, first, end)
        late = LateChanges(runs, changes, sessions, self._reporter)
        self._index.late.add(late.note)
        self._emit(late)
        for listener in self._listeners:
            listener.changed(changes)
        return len(changes.evicted)

    def _note_adapted(self, request: Request, first: int, end: int) -> None:
        self._adapted(unpack(pack_run(request.block_hashes, first, end, self._group.scale)))

    # Asked from the client's thread -------------------------------------------------------------

    def resident(self) -> bytes:
        """Keys of all cached blocks, packed, each once.

        Reads the pool's list of blocks, which never changes, in slices, so that the engine's thread
        can run in between. Blocks that change meanwhile are corrected by the events queued since.
        """
        return resident_keys(self._pool, self._group.suffix)

    def pressure(self) -> Pressure:
        """The pool's present load."""
        return Pressure(
            total_blocks=self._pool.num_gpu_blocks - 1,  # without the null block
            free_blocks=self._pool.get_num_free_blocks(),
            cached_blocks=len(self._pool.cached_block_hash_to_block),
            running=len(self.running),
            waiting=len(self._waiting),
        )


def _late_prompt(recent: RecentPrompts, request: Request, blocks: int) -> LatePrompt | None:
    tokens = request.prompt_token_ids  # None: it has embeddings instead
    return None if tokens is None else LatePrompt(recent, tokens, blocks)


def _protected(meaning: Meaning, hashes: Sequence[bytes], size: int) -> Iterator[list[int]]:
    """Keys of the blocks of ``size`` tokens that a caller's segments protect."""
    for segment in meaning.segments:
        if segment.layer in PROTECTED_LAYERS:
            covered = hashes[segment.start // size : -(-segment.end // size)]
            yield [key_of(block_hash) for block_hash in covered]


def _hashes_for_later(request: Request) -> Sequence[bytes]:
    """A request's hashes: vLLM adds to its list, and shortens it where more input is streamed."""
    return list(request.block_hashes) if request.resumable else request.block_hashes
