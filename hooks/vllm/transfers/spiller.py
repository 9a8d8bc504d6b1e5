"""Copies blocks to host memory ahead of their eviction, so that the engine never waits for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from ....graph.messages.advice import EvictionRanking
from ....graph.types import Tier
from ...keys import GROUP_BYTES, key_of
from ...link.held_ranking import worth_of
from ...tiers.directory import Copy
from ...tiers.jobs import JobDone, Spill
from ...tiers.ledger import TierLedger
from ..free_queue.queue_scan import QueueScan

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

_MOST_AT_ONCE: Final = 64  # blocks begun per step, or twice what the largest step took; chosen
_MOST_UNDER_WAY: Final = 256  # or four times that; chosen
_STEPS_AHEAD: Final = 3  # a block begun this early is usually copied in time; chosen
_LEAST_AHEAD: Final = 8
_MEMORY_S: Final = 5.0  # seconds in which the largest step seen fades to 1/e; chosen
_REST_S: Final = (
    1.0  # seconds without spills after a failed copy, so that an engine can fall idle; chosen
)

Begun = tuple["KVCacheBlock", bytes, Copy]


class Spiller:
    """Watches the head of the free queue, where the next victims are.

    A spill reads a block that no request holds. It becomes a copy only if the block still carries
    the same hash object when every worker is done: the scheduler knows of an eviction before any
    worker can overwrite the block, so a copy that could be torn is never found.

    Args:
        pool: The live block pool.
        group: The KV cache group whose blocks are copied.
        ledger: Where copies are recorded.
        spill_all: Whether blocks that the sidecar considers not worth a copy get one all the same.
    """

    def __init__(self, pool: BlockPool, group: int, ledger: TierLedger, spill_all: bool) -> None:
        self._pool = pool
        self._ledger = ledger
        self._spill_all = spill_all
        self._suffix = group.to_bytes(GROUP_BYTES, "big")
        self._under_way: set[bytes] = set()
        self._scan = QueueScan(pool)
        self._evicted = 0  # blocks that left by the queue's head since the last step
        self._largest_step = 0.0
        self._most = _MOST_AT_ONCE  # blocks begun in this step
        self._seen_at = self._rest_until = ledger.clock()
        self._spill_first: object = None  # the array that ``_worth`` was made of
        self._worth: frozenset[int] | None = None  # keys worth a copy; None: all are

    def step(
        self, ranking: EvictionRanking | None, taken: int, wanted: int, idle: bool = False
    ) -> int:
        """Begin to copy blocks that are about to go; returns how many can go without a loss.

        Args:
            ranking: The latest advice; None without any.
            taken: Blocks that this step took from the pool.
            wanted: Blocks that a prefetch would take besides.
            idle: Whether the step computes nothing. Then advice is not asked which copies make
                room: if it contradicted itself, copies would replace each other for ever, and the
                engine would never rest.
        """
        self._adopt(ranking)
        now = self._ledger.clock()
        fade = math.exp((self._seen_at - now) / _MEMORY_S)
        self._largest_step, self._seen_at = max(float(taken), fade * self._largest_step), now
        ahead = _LEAST_AHEAD + int(_STEPS_AHEAD * self._largest_step)
        # Beyond the memory's capacity, copies would replace each other without end.
        self._scan.moved(self._evicted)
        self._evicted = 0
        self._most = max(_MOST_AT_ONCE, 2 * int(self._largest_step))
        found = self._find(min(ahead + wanted, self._ledger.directory.warm_capacity), taken)
        under_way = max(_MOST_UNDER_WAY, 4 * int(self._largest_step))
        if found and len(self._under_way) < under_way and now >= self._rest_until:
            self._begin(found, [] if idle else self._demote_first(ranking))
        return self._scan.safe - int(self._largest_step)

    def evicted(self, keys: Sequence[int]) -> None:
        """Note that the engine evicted ``keys``, and whether copies are left."""
        directory, counts, worth = self._ledger.directory, self._ledger.counts, self._worth
        self._evicted += len(keys)
        if self._ledger.adapted:
            self._ledger.adapted.difference_update(keys)
        for key in keys:
            block_hash = directory.hash_of(key)
            if block_hash is not None:
                directory.leaves(block_hash)
            elif worth is None or key in worth:
                counts.spill_lost += 1
            else:
                counts.passed_over += 1

    def _adopt(self, ranking: EvictionRanking | None) -> None:
        if ranking is None or self._spill_all:
            self._worth = self._spill_first = None
        elif ranking.spill_first is not self._spill_first:
            self._scan.start_again()
            self._spill_first = ranking.spill_first
            self._worth = worth_of(ranking)

    def _find(self, ahead: int, taken: int) -> list[KVCacheBlock]:
        """Find blocks worth a copy among those of the next ``ahead`` that are looked at in this
        step."""
        directory, worth, scan = self._ledger.directory, self._worth, self._scan
        found: dict[int, KVCacheBlock] = {}
        suffix, under_way = self._suffix, self._under_way
        for place, block in scan.look(ahead, taken):
            full_hash = block.block_hash
            if full_hash is None or not full_hash.endswith(suffix):
                continue
            block_hash = full_hash[:-GROUP_BYTES]
            if block_hash in directory:
                directory.leaves(block_hash)
            elif block_hash in under_way:
                scan.must_wait(place)
            elif worth is None or key_of(block_hash) in worth:
                scan.must_wait(place)
                found[block.block_id] = block
                if len(found) >= self._most:
                    break
        return list(found.values())

    def _demote_first(self, ranking: EvictionRanking | None) -> list[bytes]:
        """Return hashes of copies that should make room, the least worth keeping first."""
        if ranking is None:
            return []
        hash_of = self._ledger.directory.hash_of
        keys = ranking.demote_first[: 2 * self._most].tolist()
        return [block_hash for block_hash in map(hash_of, keys) if block_hash is not None]

    def _begin(self, blocks: list[KVCacheBlock], demote_first: list[bytes]) -> None:
        ledger = self._ledger
        blocks = blocks[: ledger.make_room(len(blocks), demote_first)]
        if not blocks:
            return
        begun: list[Begun] = []
        for block in blocks:
            assert block.block_hash is not None
            block_hash = block.block_hash[:-GROUP_BYTES]
            may_demote = key_of(block_hash) not in ledger.adapted
            copy = ledger.directory.begin(block_hash, may_demote)
            begun.append((block, block.block_hash, copy))
            self._under_way.add(block_hash)
        job = Spill(
            ledger.book.number(),
            tuple(block.block_id for block in blocks),
            tuple(copy.id for _, _, copy in begun),
        )
        ledger.book.open(job, lambda done: self._ended(begun, done))

    def _ended(self, begun: list[Begun], done: JobDone) -> None:
        ledger, copied = self._ledger, []
        ledger.costs.spilled(done.bytes, done.seconds)
        if done.failed:
            self._rest_until = ledger.clock() + _REST_S
        for at, (block, full_hash, copy) in enumerate(begun):
            self._under_way.discard(copy.block_hash)
            # ``is``: a block that was evicted and filled again carries an equal hash at best.
            if at in done.failed or block.block_hash is not full_hash:
                ledger.counts.spill_failed += at in done.failed
                ledger.directory.abandon(copy)
            elif ledger.directory.complete(copy):
                copied.append(copy.block_hash)
        ledger.counts.spilled += len(copied)
        ledger.announce(copied, Tier.WARM)
