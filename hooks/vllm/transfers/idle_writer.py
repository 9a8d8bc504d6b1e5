"""``IdleWriter``: what has been here for an hour gets its disk copy, though nothing evicts it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from ...tiers.ledger import TierLedger

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.request import Request

    from ..observe.group import ObservedGroup
    from .spiller import Spiller

IDLE_S: Final = 3600.0
"""Seconds after which the blocks that a request computed are written; chosen."""
_MOST: Final = 262_144  # blocks remembered, some 20 MiB; beyond, the oldest are due; chosen
_AT_ONCE: Final = 32  # blocks: half of what may be on its way to the disk; chosen
_COPIED_S: Final = 1.0  # until copies that were begun are there, or will not be; chosen


class IdleWriter:
    """Has the disk keep what idle sessions left in pool and memory, so that it survives a restart.

    Without it only what leaves the memory reaches the disk. Blocks that a request computed are due
    an hour after its end, root first, so that a chain is on disk whole; of those that left the
    engine meanwhile nothing is done. Writes begin in the engine's steps, a few at a time and only
    while no other copy is on its way to the disk, and keep no engine awake.

    Args:
        group: The observed KV cache group.
        ledger: Where copies are recorded.
        copy: Begins to copy blocks of the pool.
        in_pool: Whether the pool has a block.
        idle_s: See ``IDLE_S``.
    """

    def __init__(
        self,
        group: ObservedGroup,
        ledger: TierLedger,
        copy: Callable[[Sequence[bytes]], None],
        in_pool: Callable[[bytes], bool],
        idle_s: float = IDLE_S,
    ) -> None:
        self._group, self._ledger, self._copy, self._in_pool = group, ledger, copy, in_pool
        self._idle_s = idle_s
        self._running: dict[str, tuple[Request, int]] = {}  # and of its blocks, those found
        self._left: deque[tuple[float, Sequence[bytes]]] = deque()  # when they are due
        self._remembered = 0  # blocks in these
        self._due: deque[bytes] = deque(maxlen=_MOST)
        self._copying: tuple[float, list[bytes]] = (0.0, [])  # when these are looked for

    @classmethod
    def of(
        cls, pool: BlockPool, group: ObservedGroup, ledger: TierLedger, spiller: Spiller
    ) -> IdleWriter:
        """Make that of an engine's pool."""

        def in_pool(block_hash: bytes) -> bool:
            cached = pool.cached_block_hash_to_block  # looked up each time: a reset makes another
            return cached.get_one_block(block_hash + group.suffix) is not None

        def copy(hashes: Sequence[bytes]) -> None:
            spiller.copy(hashes, group.suffix)

        return cls(group, ledger, copy, in_pool)

    def request_scheduled(self, request: Request, found: int) -> None:
        """Note that a request runs, of whose blocks the first ``found`` were computed before."""
        alone = request.lora_request is None  # an adapter's blocks may not be on disk
        if alone and self._ledger.directory.cold_capacity:
            self._running.setdefault(request.request_id, (request, found))

    def request_finished(self, request_id: str, exact: int | None) -> None:
        """Note that a request ended; of its tokens, the first ``exact`` are (None: all)."""
        request, found = self._running.pop(request_id, (None, 0))
        if request is None:
            return
        if hashes := self._group.computed(request, exact)[found:]:
            self._left.append((self._ledger.clock() + self._idle_s, hashes))
            self._remembered += len(hashes)

    def step(self) -> None:
        """Begin with what is due."""
        now = self._ledger.clock()
        while self._left and (self._left[0][0] <= now or self._remembered > _MOST):
            _, hashes = self._left.popleft()
            self._remembered -= len(hashes)
            self._due.extend(hashes)
        at, copied = self._copying
        if copied and now >= at:
            self._copying = (now, [])
            self._write(copied)
        elif self._due and not copied and self._ledger.disk.idle:
            self._begin(now)

    def end(self) -> None:
        """Forget all: the weights may be others than those that the disk's file names."""
        self._running.clear()
        self._left.clear()
        self._due.clear()
        self._remembered, self._copying = 0, (0.0, [])

    def _begin(self, now: float) -> None:
        """Write the next that are in memory; have copied first those that only the pool has."""
        batch = [self._due.popleft() for _ in range(min(_AT_ONCE, len(self._due)))]
        directory = self._ledger.directory
        lacking = [each for each in batch if each not in directory and self._in_pool(each)]
        self._write([each for each in batch if each in directory])
        if lacking:
            self._copy(lacking)
            self._copying = (now + _COPIED_S, lacking)

    def _write(self, hashes: Sequence[bytes]) -> None:
        directory = self._ledger.directory
        self._ledger.disk.keep([each for each in map(directory.warm, hashes) if each is not None])
        # What the pool has too is stored twice: these copies are the first to go.
        directory.used(list(filter(self._in_pool, hashes)))
