"""What happens to an engine's blocks and requests, told as events."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from ...graph.events import (
    AnyEvent,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    Pressure,
    RequestFinished,
    RequestStarted,
)
from .eviction import FreeQueueArranger
from .index import BlockIndex
from .keys import external_key, pack_external, pack_hashes, unpack
from .tagging import MAX_NAME, Meaning, TagReader

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.request import Request

_SCAN_SLICE: Final = 4096


@dataclass(frozen=True, slots=True)
class ObservedGroup:
    """The KV cache group whose blocks we observe; sizes in tokens."""

    index: int
    block_size: int
    hash_block_size: int

    def hashes(self, request: Request, tokens: int) -> Sequence[bytes]:
        """The hashes of the full blocks in the request's first ``tokens`` tokens."""
        scale = self.block_size // self.hash_block_size
        # A hash covers its whole prefix, so a larger block's hash is that of its last part.
        hashes: Sequence[bytes] = request.block_hashes
        return hashes[scale - 1 : tokens // self.hash_block_size : scale]


class EngineObserver:
    """Turns a scheduler's calls and a pool's KV events into our events.

    Args:
        pool: The live block pool.
        group: The KV cache group to observe.
        index: Learns which block holds which key.
        arranger: Is told of evictions.
        emit: Takes each event; must not wait.
    """

    def __init__(
        self,
        pool: BlockPool,
        group: ObservedGroup,
        index: BlockIndex,
        arranger: FreeQueueArranger,
        emit: Callable[[AnyEvent], None],
    ) -> None:
        self._pool = pool
        self._group = group
        self._index = index
        self._arranger = arranger
        self._emit = emit
        self._tags = TagReader()
        self._waiting: dict[str, int] = {}  # request id → cached tokens at its last lookup
        self._running: dict[str, Meaning] = {}
        self._kinds = _event_kinds()

    # Requests -----------------------------------------------------------------------------------

    def request_queued(self, request: Request) -> None:
        """A request arrived."""
        self._waiting[request.request_id] = 0

    def request_looked_up(self, request: Request, cached_tokens: int) -> None:
        """The prefix cache holds the request's first ``cached_tokens`` tokens."""
        if request.request_id in self._waiting:
            self._waiting[request.request_id] = cached_tokens

    def request_scheduled(self, request: Request) -> None:
        """A request got blocks: news only the first time, not after a preemption."""
        if request.request_id in self._running:
            return
        prompt = request.num_prompt_tokens
        meaning = self._tags.read(request.kv_transfer_params, prompt)
        self._running[request.request_id] = meaning
        self._emit(
            RequestStarted(
                request_id=request.request_id[:MAX_NAME],
                hashes=pack_hashes(self._group.hashes(request, prompt)),
                prompt_tokens=prompt,
                cached_tokens=self._waiting.pop(request.request_id, 0),
                block_size=self._group.block_size,
                session=_session(request, meaning),
                tenant=meaning.tenant,
                segments=meaning.segments,
            )
        )

    def request_finished(self, request: Request, block_ids: Sequence[Sequence[int]]) -> None:
        """A request ended and its blocks are about to be freed."""
        self._waiting.pop(request.request_id, None)
        meaning = self._running.pop(request.request_id, None)
        if meaning is None:
            return  # aborted before it was ever scheduled: it touched no block
        packed = self._remember(request, block_ids[self._group.index])
        self._emit(
            RequestFinished(
                request_id=request.request_id[:MAX_NAME],
                hashes=packed,
                prompt_tokens=request.num_prompt_tokens,
                total_tokens=request.num_tokens,
                reason=request.status.name.lower(),
                session=_session(request, meaning),
                tenant=meaning.tenant,
                waiting_for_tool=meaning.waiting_for_tool,
                expected_return_s=meaning.expected_return_s,
                session_ended=meaning.session_ended,
            )
        )

    def _remember(self, request: Request, block_ids: Sequence[int]) -> bytes:
        """Index the request's cached blocks; their packed keys."""
        hashes = self._group.hashes(request, request.num_computed_tokens)
        blocks = [self._pool.blocks[i] for i in block_ids[: len(hashes)]]
        while blocks and blocks[-1].block_hash is None:
            blocks.pop()  # full, but not in the prefix cache: the request ended before
        packed = pack_hashes(hashes[: len(blocks)])
        self._index.remember(unpack(packed), blocks)
        return packed

    # Blocks -------------------------------------------------------------------------------------

    def blocks_changed(self, events: Sequence[KVCacheEvent]) -> None:
        """The pool's KV events of one step; on the engine's hot path."""
        ours, kinds, forget = self._group.index, self._kinds, self._index.forget
        removed: list[int] = []
        for event in events:
            kind = kinds.get(type(event))
            if kind is _Kind.REMOVED:
                if event.group_idx == ours:
                    keys = map(external_key, event.block_hashes)
                    removed.extend([key for key in keys if forget(key)])
                continue
            self._tell_removed(removed)
            if kind is _Kind.STORED:
                # Of another size is an entry for part of a block: nothing that can be ranked.
                if event.group_idx == ours and event.block_size == self._group.block_size:
                    self._stored(event)
            elif kind is _Kind.CLEARED:
                self._cleared()
        self._tell_removed(removed)

    def _stored(self, event: Any) -> None:
        parent, session = event.parent_block_hash, event.session_id
        self._emit(
            BlocksStored(
                pack_external(event.block_hashes),
                None if parent is None else external_key(parent),
                event.block_size,
                session[:MAX_NAME] if session else None,
            )
        )

    def _tell_removed(self, removed: list[int]) -> None:
        if removed:
            self._emit(BlocksRemoved(pack_external(removed)))
            self._arranger.evicted(removed)
            removed.clear()

    def _cleared(self) -> None:
        self._index.clear()
        self._arranger.clear()
        self._emit(BlocksCleared())

    # Asked from the client's thread -------------------------------------------------------------

    def resident(self) -> bytes:
        """Keys of all cached blocks, packed, each once.

        Reads the pool's list of blocks, which never changes, in slices that let the engine's
        thread in between. Blocks that change meanwhile are corrected by the events queued since.
        """
        suffix = self._group.index.to_bytes(4, "big")
        hashes: set[bytes] = set()
        for start in range(0, len(self._pool.blocks), _SCAN_SLICE):
            for block in self._pool.blocks[start : start + _SCAN_SLICE]:
                block_hash = block.block_hash
                if block_hash is not None and block_hash.endswith(suffix):
                    hashes.add(block_hash[:-4])
            time.sleep(0)
        return pack_hashes(list(hashes))

    def pressure(self) -> Pressure:
        """The pool's load now."""
        return Pressure(
            total_blocks=self._pool.num_gpu_blocks - 1,  # without the null block
            free_blocks=self._pool.get_num_free_blocks(),
            cached_blocks=len(self._pool.cached_block_hash_to_block),
            running=len(self._running),
            waiting=len(self._waiting),
        )


def _session(request: Request, meaning: Meaning) -> str | None:
    """The engine's own session id wins over the tag's."""
    session = request.session_id
    return session[:MAX_NAME] if session else meaning.session


class _Kind(Enum):
    STORED = 0
    REMOVED = 1
    CLEARED = 2


def _event_kinds() -> dict[type, _Kind]:
    from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

    return {BlockStored: _Kind.STORED, BlockRemoved: _Kind.REMOVED, AllBlocksCleared: _Kind.CLEARED}
