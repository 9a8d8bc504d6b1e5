"""Keeps requests that wait for a load from blocking a reset of the prefix cache.

Stock vLLM preempts running requests and then resets its prefix cache. A request that waits for a
load cannot be preempted; and with overlapping steps, the blocks of preempted requests are held back
until the step under way is over, because a load might write to them. Neither is a reason to refuse
new weights: the load is void, and its request computes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

    from .loader import Loader
    from .prefetcher import Prefetcher


class Promises:
    """Loads that vLLM was promised, whose requests were not scheduled since.

    Args:
        pool: The live block pool.
        manager: vLLM's record of which request holds which blocks.
    """

    def __init__(self, pool: BlockPool, manager: KVCacheManager) -> None:
        self._pool = pool
        self._manager = manager
        self._waiting: dict[str, Request] = {}
        self._received: set[str] = set()  # of them, those whose load is over
        self._void: set[str] = set()  # of them, those with a load of what counts no longer

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def binding(self) -> bool:
        """Whether a request waits for bytes that are still valid."""
        return len(self._waiting) > len(self._received | self._void)

    def made(self, request: Request) -> None:
        """Note that ``request`` waits for a load into its blocks."""
        self._waiting[request.request_id] = request

    def request_resumed(self, request_id: str) -> None:
        """Note that a request runs."""
        if self._waiting:
            self._forget(request_id)

    def request_finished(self, request_id: str) -> None:
        """Note that a request ended. While its load is under way, vLLM keeps its blocks."""
        if request_id in self._received:
            self._forget(request_id)

    def received(self, request_ids: Iterable[str]) -> None:
        """Note that vLLM is about to learn that these loads are over, and has learned of failed
        blocks."""
        for request_id in request_ids:
            request = self._waiting.get(request_id)
            if request is None:
                continue
            if request.is_finished():
                self._forget(request_id)
                continue
            self._received.add(request_id)
            if request_id in self._void:
                self._compute(request)

    def lend(self) -> list[KVCacheBlock]:
        """Return all blocks in use, each as often as it is held, if only our requests hold any."""
        (manager,) = self._manager.coordinator.single_type_managers
        others = [name for name in manager.req_to_blocks if name not in self._waiting]
        if any(manager.req_to_blocks[name] for name in others):
            return []
        used = [block for block in self._pool.blocks if block.ref_cnt and not block.is_null]
        return [block for block in used for _ in range(block.ref_cnt)]

    def renewed(self) -> None:
        """Void the loads under way: the prefix cache was reset, perhaps for new weights."""
        self._void.update(self._waiting)
        for request_id in self._received:
            self._compute(self._waiting[request_id])

    def _compute(self, request: Request) -> None:
        """Start the request over: every worker is done with its blocks, and vLLM finds nothing to
        cache."""
        self._manager.free(request)
        request.num_computed_tokens = 0

    def _forget(self, request_id: str) -> None:
        self._waiting.pop(request_id, None)
        self._received.discard(request_id)
        self._void.discard(request_id)


class NoPromises:
    """What is known of loads under way where vLLM's book of requests is not to be had.

    Args:
        loader: Knows whether requests wait for loads.
        prefetcher: Knows which blocks loads are filling for nobody yet.
    """

    def __init__(self, loader: Loader, prefetcher: Prefetcher) -> None:
        self._loader = loader
        self._prefetcher = prefetcher

    def __len__(self) -> int:
        return self._loader.under_way

    @property
    def binding(self) -> bool:
        """Whether a request waits for bytes that still count."""
        return self._loader.under_way > 0

    def made(self, request: Request) -> None:
        """``request`` waits for a load into its blocks."""

    def request_resumed(self, request_id: str) -> None:
        """A request runs."""

    def request_finished(self, request_id: str) -> None:
        """A request ended."""

    def received(self, request_ids: Iterable[str]) -> None:
        """These loads are over."""

    def lend(self) -> list[KVCacheBlock]:
        """The blocks of prefetches under way."""
        return self._prefetcher.held.copy()

    def renewed(self) -> None:
        """The prefix cache was reset."""
