"""Loads copies into free blocks before a request asks, as the sidecar suggests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from ....graph.types import Keys
from ....graph.wire.events import BlocksLoaded
from ...keys import key_of, pack_keys
from ...tiers.jobs import Finish, JobDone, Load
from ...tiers.ledger import TierLedger
from .loader import Loader, settle_copies, take_copies

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    from ....graph.wire.events import AnyEvent
    from ..groups import ObservedGroup
    from ..index import BlockIndex


class WaitingLine:
    """How many blocks the requests in vLLM's queue need together."""

    def __init__(self) -> None:
        self.needed = 0
        self._blocks: dict[str, int] = {}  # by request

    def join(self, request_id: str, blocks: int) -> None:
        self.leave(request_id)
        self._blocks[request_id] = blocks
        self.needed += blocks

    def leave(self, request_id: str) -> None:
        self.needed -= self._blocks.pop(request_id, 0)


_MOST_AT_ONCE: Final = 64  # loads of blocks started per step; chosen
_MOST_UNUSED_SHARE: Final = 2  # at most 1/2 of the pool may hold blocks not yet hit; chosen
_MEMORY: Final = 128  # blocks over which the hit rate is measured; chosen
_LEAST_TRUST: Final = 0.25  # floor, so that prefetching can recover; chosen
_LEAST_FREE_SHARE: Final = 8  # at least 1/8 of the pool stays free for requests; chosen
_SCAN: Final = 512  # suggestions looked at per step; chosen


class Prefetcher:
    """Fills free blocks from copies and registers them in the prefix cache, unreferenced."""

    def __init__(
        self,
        pool: BlockPool,
        group: ObservedGroup,
        index: BlockIndex,
        ledger: TierLedger,
        emit: Callable[[AnyEvent], None],
        line: WaitingLine,
        loader: Loader,
    ) -> None:
        self._pool, self._group, self._index = pool, group, index
        self._ledger, self._emit = ledger, emit
        self._line, self._load_victims = line, loader.load_victims
        self._order: Keys | None = None
        self._next = self._left = 0  # left: of the order, while the sidecar stands by it
        self.unused: set[int] = set()  # keys that were brought back and not hit yet
        self._under_way = 0  # blocks that loads are filling
        self._cancelled: int | None = None  # the key that there was no room for last
        self._trust = 0.5  # how many of the last blocks that were brought back were hit

    def offered(self, order: Keys | None) -> int:
        """Take the newest order, if any; returns how many blocks a step would take."""
        if order is not None and order is not self._order:
            self._order, self._next = order, 0
        self._left = 0 if order is None else len(order) - self._next
        return min(self._left, _MOST_AT_ONCE)

    def step(self, spare: int) -> None:
        """Begin the next suggestions in ``spare`` blocks, which cost nothing to take."""
        if self._left:
            assert self._order is not None
            hashes = self._next_hashes(self._order, self._room(min(spare, _MOST_AT_ONCE)))
            if hashes:
                self._begin(hashes)

    def hit(self, hashes: Sequence[bytes]) -> None:
        """Note that a request found these blocks in the prefix cache."""
        if self.unused:
            for block_hash in hashes:
                key = key_of(block_hash)
                if key in self.unused:
                    self.unused.remove(key)
                    self._ledger.counts.prefetch_useful += 1
                    self._trust += (1.0 - self._trust) / _MEMORY

    def evicted(self, keys: Sequence[int]) -> None:
        if self.unused:
            wasted = self.unused.intersection(keys)
            self.unused -= wasted
            self._ledger.counts.prefetch_wasted += len(wasted)
            self._trust *= (1.0 - 1.0 / _MEMORY) ** len(wasted)

    def clear(self) -> None:
        """Forget the blocks that were not hit yet: the prefix cache was reset."""
        self._ledger.counts.prefetch_wasted += len(self.unused)
        self.unused.clear()

    def _room(self, spare: int) -> int:
        pool, needed = self._pool, self._line.needed
        free: int = pool.get_num_free_blocks() - needed - pool.num_gpu_blocks // _LEAST_FREE_SHARE
        unused = len(self.unused) + self._under_way
        most = pool.num_gpu_blocks // _MOST_UNUSED_SHARE
        allowed = int(most * max(self._trust, _LEAST_TRUST)) - unused
        return max(0, min(spare, free, allowed))

    def _next_hashes(self, order: Keys, room: int) -> list[bytes]:
        """Return the next suggested blocks that have a copy and are not in the pool."""
        ledger = self._ledger
        found: list[bytes] = []
        keys = order[self._next : self._next + _SCAN].tolist()
        for key, block_hash in zip(keys, ledger.directory.hashes_of(keys), strict=True):
            self._next += 1
            if block_hash is None or self._is_there(block_hash):
                continue
            if len(found) >= room:
                # The chain's next blocks are unreachable without this one: the rest must wait
                # for the sidecar's next suggestion.
                ledger.counts.prefetch_cancelled += key != self._cancelled
                self._cancelled, self._next = key, len(order)
                break
            found.append(block_hash)
        return found[: ledger.directory.run(found)]

    def _is_there(self, block_hash: bytes) -> bool:
        """Whether a block is in the pool, or a load is bringing it there."""
        return block_hash in self._ledger.coming or self._group.is_in(self._pool, block_hash)

    def _begin(self, hashes: list[bytes]) -> None:
        ledger = self._ledger
        self._load_victims.prepare(len(hashes))
        blocks = self._pool.get_new_blocks(len(hashes))
        self._under_way += len(hashes)
        taken = take_copies(ledger, hashes)
        copies, from_disk, _ = taken
        cold = len(from_disk) * ledger.block_bytes
        ledger.expect(hashes, len(hashes) * ledger.block_bytes - cold, cold)
        job = Load(
            ledger.book.number(),
            taken.ids,
            tuple(block.block_id for block in blocks),
            from_disk,
            None,
            from_store=taken.from_store,
        )

        def ended(done: JobDone) -> None:
            ledger.arrived(hashes)
            self._under_way -= len(hashes)
            valid = ledger.directory.holds
            good = [at for at in range(len(hashes)) if at not in done.failed and valid(copies[at])]
            kept_off = (key_of(hashes[at]) for at in good if not copies[at].may_demote)
            ledger.kept_off_disk.update(kept_off)
            self._register([hashes[at] for at in good], [blocks[at] for at in good])
            # Head first in the list, so that the tail is freed, and evicted, before it.
            self._pool.free_blocks(reversed(blocks))
            settle_copies(ledger, taken, done, hashes)

        over: Finish = ended
        try:
            over = self._load_victims.save(job.targets, ended)
        finally:  # whatever fails: by its load's end, and by nothing else, the blocks come back
            ledger.book.open(job, over)

    def _register(self, hashes: list[bytes], blocks: list[KVCacheBlock]) -> None:
        """Enter filled blocks into the prefix cache, unless a request computed them meanwhile."""
        new: list[tuple[int, KVCacheBlock]] = []
        for block_hash, block in zip(hashes, blocks, strict=True):
            if not self._group.is_in(self._pool, block_hash):
                full_hash = block_hash + self._group.suffix
                self._pool._insert_block_hash(full_hash, block, self._group.block_size)
                new.append((key_of(block_hash), block))
        keys = [key for key, _ in new]
        self._index.remember(keys, [block.block_id for _, block in new])
        self.unused.update(keys)
        self._ledger.counts.prefetched += len(keys)
        if keys:
            self._emit(BlocksLoaded(pack_keys(keys)))
