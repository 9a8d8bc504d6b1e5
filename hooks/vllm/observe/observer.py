"""Reports what happens to an engine's blocks and requests, as events."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from ....graph.messages.events import (
    MAX_NAME,
    AnyEvent,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    Pressure,
    RequestFinished,
    RequestStarted,
)
from ....graph.types import PROTECTED_LAYERS
from ...keys import key_of, keys_in_pool, pack_hashes, pack_keys, pack_run, unpack
from .group import ObservedGroup
from .hints import hint_policy
from .index import BlockIndex
from .resident import resident_keys
from .returned import returned
from .tags import NO_MEANING, Meaning, TagReader
from .tap import Cached, Change

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.request import Request

    from ...link.outbox import Later


class EvictionListener(Protocol):
    """Is told what left the prefix cache."""

    def evicted(self, keys: Sequence[int]) -> None:
        """Note that the engine evicted ``keys``."""

    def clear(self) -> None:
        """Note that the prefix cache was reset."""


def _nobody_asks(keys: Sequence[int]) -> None:
    pass


def _as_told(event: RequestFinished, request: Request) -> AnyEvent | Later:
    return event


class EngineObserver:
    """Turns a scheduler's calls and a pool's changes into our events.

    Args:
        pool: The live block pool.
        group: The KV cache group to observe.
        index: Learns which block holds which key.
        listeners: Are told of evictions.
        emit: Takes each event; must not wait.
        stated: Is told which keys a caller says are protected.
        adapted: Is told which keys a LoRA adapter computed, as they enter the prefix cache.
        ended: What to emit at a request's end, for what callers say of it.
    """

    def __init__(
        self,
        pool: BlockPool,
        group: ObservedGroup,
        index: BlockIndex,
        listeners: Sequence[EvictionListener],
        emit: Callable[[AnyEvent | Later], None],
        stated: Callable[[Sequence[int]], None] = _nobody_asks,
        adapted: Callable[[Sequence[int]], None] = _nobody_asks,
        ended: Callable[[RequestFinished, Request], AnyEvent | Later] = _as_told,
    ) -> None:
        self.stored = 0  # blocks, since the start
        self._pool = pool
        self._group = group
        self._scale, self._suffix = group.scale, group.suffix
        self._index, self._listeners = index, listeners
        self._emit = emit
        self._stated, self._adapted, self._ended = stated, adapted, ended
        self._tags = TagReader(hint_policy(os.environ))
        self._waiting: dict[str, int] = {}  # request id → cached tokens at its last lookup
        self._meant: dict[str, Meaning] = {}  # of those whose meaning was asked for
        self.running: dict[str, tuple[Request, Meaning]] = {}  # scheduled, and not over

    # Requests -----------------------------------------------------------------------------------

    def request_queued(self, request: Request) -> None:
        """Note that a request arrived."""
        self._waiting[request.request_id] = 0

    def meaning(self, request: Request) -> Meaning:
        """What the caller says about a request that was not scheduled yet."""
        meaning = self._meant[request.request_id] = self._read(request)
        return meaning

    def request_looked_up(self, request: Request, cached_tokens: int) -> None:
        """Note that the prefix cache holds the request's first ``cached_tokens`` tokens."""
        if request.request_id in self._waiting:
            self._waiting[request.request_id] = cached_tokens

    def request_scheduled(self, request: Request, to_load: int = 0) -> None:
        """Note that a request got blocks; reported the first time only, not after a preemption."""
        if request.request_id in self.running:
            return
        prompt = request.num_prompt_tokens
        meaning = self._meant.pop(request.request_id, None) or self._read(request)
        self.running[request.request_id] = request, meaning
        hashes = self._group.hashes(request, prompt)
        for keys in _protected(meaning, hashes, self._group.block_size):
            self._stated(keys)
        self._emit(
            RequestStarted(
                request_id=request.request_id[:MAX_NAME],
                hashes=pack_hashes(hashes),
                prompt_tokens=prompt,
                cached_tokens=self._waiting.pop(request.request_id, 0),
                block_size=self._group.block_size,
                session=meaning.session,
                tenant=meaning.tenant,
                segments=meaning.segments,
                loading_tokens=to_load,
                reads_cache=not getattr(request, "skip_reading_prefix_cache", False),
            )
        )

    def request_finished(self, request: Request, block_ids: Sequence[Sequence[int]]) -> None:
        """Note that a request ended, and that its blocks are about to be freed."""
        self._waiting.pop(request.request_id, None)
        self._meant.pop(request.request_id, None)
        _, meaning = self.running.pop(request.request_id, (None, None))
        if meaning is None:
            return  # aborted before it was ever scheduled: it touched no block
        event = RequestFinished(
            request_id=request.request_id[:MAX_NAME],
            hashes=self._remember(request, block_ids[self._group.index]),
            prompt_tokens=request.num_prompt_tokens,
            total_tokens=request.num_tokens,
            reason=request.status.name.lower(),
            session=meaning.session,
            tenant=meaning.tenant,
            waiting_for_tool=meaning.waiting_for_tool,
            expected_return_s=meaning.expected_return_s,
            session_ended=meaning.session_ended,
            tool=meaning.tool,
        )
        self._emit(self._ended(event, request))

    def requests_preempted(self, request_ids: Iterable[str]) -> None:
        """Note that requests lost their blocks, which can be evicted now, and will be scheduled
        again."""
        for request_id in request_ids:
            request, _ = self.running.get(request_id, (None, None))
            if request is not None:
                hashes = self._group.hashes(request, request.num_tokens)
                self._index.rediscover([each + self._group.suffix for each in hashes])

    def _read(self, request: Request) -> Meaning:
        return self._tags.read(
            request.kv_transfer_params,
            request.num_prompt_tokens,
            request.session_id,
            request.cache_salt,
        )

    def _remember(self, request: Request, block_ids: Sequence[int]) -> bytes:
        """Index the request's cached blocks; returns their packed keys."""
        hashes, blocks = self._group.hashes(request, request.num_computed_tokens), self._pool.blocks
        count = min(len(hashes), len(block_ids))
        while count and blocks[block_ids[count - 1]].block_hash is None:
            count -= 1  # full, but not in the prefix cache: the request ended before
        packed = pack_hashes(hashes[:count])
        self._index.remember(unpack(packed), block_ids)
        return packed

    # Blocks -------------------------------------------------------------------------------------

    def blocks_changed(self, changes: Sequence[Change]) -> int:
        """Report what a step cached, then the evicted keys that are not cached again, at once.

        Returns how many blocks of any group were evicted, since a reset if there was one.
        """
        removed: list[bytes] = []
        for change in changes:
            if type(change) is list:
                removed += change
            elif type(change) is Cached:
                self._stored(*change)
            else:
                self._removed(removed)
                removed = []
                self._cleared()
        self._removed(removed, changes)
        return len(removed)

    def _stored(self, request: Request, first: int, end: int) -> None:
        hashes, scale = request.block_hashes, self._scale
        _, meaning = self.running.get(request.request_id) or (request, NO_MEANING)
        self.stored += end - first
        packed = pack_run(hashes, first, end, scale)
        if request.lora_request is not None:
            self._adapted(unpack(packed))
        self._emit(
            BlocksStored(
                packed,
                key_of(hashes[scale * first - 1]) if first else None,
                self._group.block_size,
                meaning.session if meaning.tenant is None else None,  # a name is its tenant's
            )
        )

    def _removed(self, hashes: list[bytes], changes: Sequence[Change] = ()) -> None:
        suffix = self._suffix
        ours = [each for each in hashes if each.endswith(suffix)]
        keys = keys_in_pool(ours)
        if gone := self._index.forget(ours, keys):
            self._emit(BlocksRemoved(pack_keys(gone)))
            for listener in self._listeners:
                listener.evicted(gone)
        for request, first, end in returned(changes, keys, gone, self._scale):
            self._emit(BlocksRemoved(pack_run(request.block_hashes, first, end, self._scale)))
            self._stored(request, first, end)

    def _cleared(self) -> None:
        self._index.clear()
        for listener in self._listeners:
            listener.clear()
        self._emit(BlocksCleared())

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


def _protected(meaning: Meaning, hashes: Sequence[bytes], size: int) -> Iterator[list[int]]:
    """Keys of the blocks of ``size`` tokens that a caller's segments protect."""
    for segment in meaning.segments:
        if segment.layer in PROTECTED_LAYERS:
            covered = hashes[segment.start // size : -(-segment.end // size)]
            yield [key_of(block_hash) for block_hash in covered]
