"""``LoadVictims``: copies the blocks that a load is about to overwrite."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from ....graph.messages.advice import EvictionRanking
from ...keys import keys_in_pool
from ...tiers.directory import all_leave
from ...tiers.jobs import Finish, JobDone, Spill
from ...tiers.ledger import TierLedger
from ..pool.copy_marks import CopyMarks
from ..pool.found_blocks import FoundBlocks, hash_of

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


class LoadVictims:
    """Copies what the pool gives to a load, before the load overwrites it.

    A step writes at once to the blocks that it computes. A load gets all its blocks in one step,
    and nobody writes to them before it. So they need no copy ahead of time: the lane that loads
    copies them first.

    Args:
        pool: The live block pool.
        ledger: Where copies are recorded.
        marks: Which blocks are worth a copy.

    Attributes:
        advice: The latest, which says what copies make room; None without any.
    """

    def __init__(self, pool: BlockPool, ledger: TierLedger, marks: CopyMarks) -> None:
        self._pool, self._ledger, self._marks = pool, ledger, marks
        self._count = 0  # blocks that a load would be given
        self._freed = True  # whether blocks were given back since a load was foreseen
        self._head: list[tuple[KVCacheBlock, bytes | None]] = []  # those blocks, and their hashes
        self.advice: EvictionRanking | None = None

    def freed(self) -> None:
        """Note that blocks were given back: there may be room now for who waits."""
        self._freed = True

    def foresee(self, count: int) -> None:
        """Note that a load may be given the next ``count`` blocks; 0: none will come.

        vLLM asks in every step that a request waits for room. Where it found none, and nothing was
        given back since, it finds none again: then nothing is looked at.
        """
        if count and count == self._count and not self._freed:
            self._head = []  # others may have written to some of them
        else:
            self._freed = False
            self.prepare(count)

    def prepare(self, count: int) -> None:
        """Note that a load is given the next ``count`` blocks, if there are so many."""
        self._count = count if count <= self._pool.get_num_free_blocks() else 0
        self.look()

    def look(self) -> None:
        """Note what those blocks hold: what stands at the queue's head may have changed."""
        head = self._pool.free_block_queue.iter_blocks_after(None) if self._count else ()
        blocks = list(islice(head, self._count))
        self._head = list(zip(blocks, map(hash_of, blocks), strict=True))

    def save(self, block_ids: Iterable[int], load_ended: Finish) -> Finish:
        """Begin to copy what a load's blocks held, as far as it is worth it and there is room.

        Called when the load was given them, and before it is ordered.

        Returns:
            ``load_ended``, and what else is to be done when the load ends. What is not copied by
            then may be torn: if the load was given up, others may write to its blocks.
        """
        given, head = set(block_ids), self._head
        self._count, self._head = 0, []
        taken = [(block, held) for block, held in head if held and block.block_id in given]
        hashes = [held for _, held in taken]
        directory = self._ledger.directory
        all_leave(directory, hashes)  # copies of these are the only ones now
        found = FoundBlocks.told([block for block, _ in taken], hashes)
        worthy, keys = self._marks.worthy(found)
        copies = directory.hashes_of(keys)
        lost = [taken[at] for at, copy in zip(worthy, copies, strict=True) if copy is None]
        room = self._ledger.make_room(len(lost), demote_first(self._ledger, self.advice, len(lost)))
        # Those that came last would have stayed longest.
        return self._begin(lost[-room:], load_ended) if room else load_ended

    def _begin(self, lost: Sequence[tuple[KVCacheBlock, bytes]], load_ended: Finish) -> Finish:
        ledger = self._ledger
        hashes = [held for _, held in lost]
        keys, copies = keys_in_pool(hashes), ledger.begin_copies(hashes)
        ledger.saving.update(keys)
        ids = tuple([block.block_id for block, _ in lost])
        job = Spill(ledger.book.number(), ids, tuple([copy.id for copy in copies]), True)
        load_is_over = False

        def spill_ended(done: JobDone) -> None:
            ledger.costs.spilled(done.bytes, done.seconds)
            ledger.saving.difference_update(keys)
            ledger.counts.spill_failed += len(done.failed)
            failed = range(len(copies)) if load_is_over else done.failed
            for at in failed:
                ledger.directory.abandon(copies[at])
            ledger.complete_copies([copy for at, copy in enumerate(copies) if at not in failed])

        def end_load(done: JobDone) -> None:
            nonlocal load_is_over
            load_is_over = True
            load_ended(done)

        ledger.book.open(job, spill_ended)
        return end_load


def demote_first(ledger: TierLedger, advice: EvictionRanking | None, count: int) -> list[bytes]:
    """Return hashes of copies that should make room, the least worth keeping first."""
    if advice is None:
        return []
    hashes = ledger.directory.hashes_of(advice.demote_first[: 2 * count].tolist())
    return [block_hash for block_hash in hashes if block_hash is not None]
