"""Copies blocks to host memory ahead of their eviction, so that the engine never waits for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress, islice, takewhile
from operator import not_
from typing import TYPE_CHECKING, Final

from ....graph.messages.advice import EvictionRanking
from ...keys import GROUP_BYTES, key_in_pool, keys_in_pool
from ...link.held_ranking import Finds
from ...tiers.directory import Copy, all_leave
from ...tiers.jobs import JobDone, Spill
from ...tiers.ledger import TierLedger
from ..ahead.copy_lead import CopyLead
from ..ahead.load_victims import LoadVictims, demote_first
from ..free_queue.queue_scan import QueueScan
from ..free_queue.victims import Victims
from ..pool.copy_marks import CopyMarks
from ..pool.found_blocks import FoundBlocks, hash_of

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

_MOST_UNDER_WAY: Final = 256  # blocks, or four times what the largest step took; chosen
_AGAIN_AFTER: Final = 4096  # evictions, after which all that is about to go is looked at; chosen
_REST_S: Final = (
    1.0  # seconds without spills after a failed copy, so that an engine can fall idle; chosen
)

Placed = tuple[int | None, "KVCacheBlock"]  # with its place among all that ever left, if known
Begun = tuple[int, "KVCacheBlock", bytes, Copy]  # with its key, and its hash as it was then


@dataclass(frozen=True, slots=True)
class StepTaken:
    """What an engine's step took.

    Attributes:
        tokens: That it computes.
        evicted: Cached blocks that left the pool for it.
        held_back: Protected blocks that were moved off the head since the engine's start.
    """

    tokens: int
    evicted: int = 0
    held_back: int = 0


class Spiller:
    """Watches the head of the free queue, where the next victims are.

    A spill reads a block that no request holds. It becomes a copy only if the block still carries
    the same hash object when every worker is done: the scheduler knows of an eviction before any
    worker can overwrite the block, so a copy that could be torn is never found.

    Args:
        pool: The live block pool, of one KV cache group.
        ledger: Where copies are recorded.
        finds: Finds the blocks that are worth a copy, where nobody did beforehand.
        spill_all: Whether blocks that the sidecar considers not worth a copy get one all the same.

    Attributes:
        marks: Which blocks are worth a copy.
        load_victims: Copies what loads overwrite.
        freed: Told when blocks were given back.
    """

    def __init__(self, pool: BlockPool, ledger: TierLedger, finds: Finds, spill_all: bool) -> None:
        self._pool, self._ledger, self._spill_all = pool, ledger, spill_all
        self.marks = CopyMarks(len(pool.blocks), finds)
        self.load_victims = load_victims = LoadVictims(pool, ledger, self.marks)
        self.freed = load_victims.freed
        self._under_way: dict[int, int | None] = {}  # key → place among all that ever left
        self._scan = QueueScan(pool)
        self._gone = self._gone_then = 0  # blocks that left by the queue's head, now and then
        self._held_back = 0  # blocks that were moved for the sake of protected ones
        self._rest_until = ledger.clock()
        self._lead = CopyLead(self._rest_until)
        self._victims = Victims(0)
        self._left: deque[bytes] = deque()  # evicted blocks whose copies are not known to be wanted

    def step(
        self, ranking: EvictionRanking | None, taken: int, loads: int, wanted: int, step: StepTaken
    ) -> int:
        """Begin to copy blocks that are about to go; returns how many can go without a loss.

        Args:
            ranking: The latest advice; None without any.
            taken: Blocks that this step took from the pool to compute, blank ones too.
            loads: Blocks that loads took besides.
            wanted: Blocks that a prefetch would take besides.
            step: What else the step took.
        """
        self.load_victims.advice = ranking
        self._note_what_changed(ranking, step)
        now, directory = self._ledger.clock(), self._ledger.directory
        self._lead.stepped(taken, loads, now)
        ahead = self._lead.blocks(wanted, directory, self._pool.num_gpu_blocks)
        # An idle step asks no advice which copies make room: if it contradicted itself, copies
        # would replace each other for ever, and the engine would never rest.
        self._look(ahead, taken + loads, now, ranking if step.tokens else None)
        return self._spare(wanted) if wanted else 0

    def copy(self, hashes: Sequence[bytes], group: bytes) -> None:
        """Begin to copy blocks of the pool now, as far as there is room; ``group`` ends their keys
        in the prefix cache."""
        if hashes and self._ledger.clock() >= self._rest_until:
            blocks = _without_copy(self._pool, self._ledger, [each + group for each in hashes])
            self._begin([(None, each) for each, key in blocks if key not in self._under_way], None)

    def gone(self, keys: Sequence[int]) -> None:
        """Note that the engine evicted ``keys``; on any thread, for it only reads the ledger."""
        directory, counts, worth = self._ledger.directory, self._ledger.counts, self.marks.worth
        saving = self._ledger.saving
        hashes = directory.hashes_of(keys)
        self._left.extend(filter(directory.stands_twice, filter(None, hashes)))
        lost = [key for key in compress(keys, map(not_, hashes)) if key not in saving]
        worthy = len(lost) if worth is None else len(worth.intersection(lost))
        counts.spill_lost += worthy
        counts.passed_over += len(lost) - worthy

    def laid_more(self, victims: Victims, at_head: bool) -> None:
        """Note that advice laid blocks at the queue's head, or behind those of ``victims`` that
        stood there."""
        self._victims = victims
        if at_head:
            self.look_again()
        else:
            self._scan.start_again()

    def touched(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Note that a hit took ``blocks`` out of the free queue."""
        self._scan.touched(blocks)
        self.load_victims.look()

    def look_again(self) -> None:
        """Look at all that is about to go once more."""
        self._scan.start_again()
        self._victims.looked = 0
        self.marks.forget_passed()
        self._gone_then = self._gone
        self._under_way = dict.fromkeys(self._under_way)

    def _note_what_changed(self, ranking: EvictionRanking | None, step: StepTaken) -> None:
        self._victims.drop_taken()
        while self._left:
            self._ledger.directory.leaves(self._left.popleft())
        news = self.marks.follow(None if self._spill_all else ranking)
        news |= step.held_back != self._held_back
        self._held_back = step.held_back
        self._gone += step.evicted
        news |= self._scan.evicted(step.evicted)
        if news or self._gone - self._gone_then > _AGAIN_AFTER:
            self.look_again()

    def _look(self, ahead: int, taken: int, now: float, advice: EvictionRanking | None) -> None:
        """Look at the next of what is about to go: at what advice laid there, and behind it."""
        victims, scan = self._victims, self._scan
        if victims.looked < min(ahead, len(victims)):
            first = victims.looked
            left = self._copy(victims.look(ahead - first), first, now, advice)
            victims.looked -= left
        elif found := scan.look(ahead - len(victims), taken, victims.last):
            first = len(victims) + scan.reached - len(found)
            if left := self._copy(FoundBlocks.told(found), first, now, advice):
                scan.back_to(found, len(found) - left)

    def _copy(
        self, found: FoundBlocks, first: int, now: float, advice: EvictionRanking | None
    ) -> int:
        """Begin to copy those of ``found`` that are worth it, the first of which stands at place
        ``first``; returns how many of the last must be looked at again."""
        first += self._gone
        wanted = self._without_copies(found, first)
        most = max(_MOST_UNDER_WAY, 4 * int(self._lead.step)) - len(self._under_way)
        begun = 0
        if wanted and most > 0 and now >= self._rest_until:
            begun = self._begin([(first + at, found.blocks[at]) for at in wanted[:most]], advice)
        return len(found.blocks) - wanted[begun] if begun < len(wanted) else 0

    def _without_copies(self, found: FoundBlocks, first: int) -> list[int]:
        """Which of ``found`` are worth a copy and have none, nor one under way."""
        directory, under_way = self._ledger.directory, self._under_way
        all_leave(directory, found.hashes)
        worthy, keys = self.marks.worthy(found)
        if under_way:
            places = zip(keys, worthy, strict=True)
            under_way.update({key: first + at for key, at in places if key in under_way})
        has = directory.hashes_of(keys)
        return [
            at
            for at, key, copied in zip(worthy, keys, has, strict=True)
            if copied is None and key not in under_way
        ]

    def _spare(self, wanted: int) -> int:
        """How many blocks at the head the next step leaves that can go without a loss, as far as is
        known."""
        step = int(max(self._lead.step, self._lead.load))
        head = islice(self._pool.free_block_queue.iter_blocks_after(None), wanted + step)
        blanks = sum(1 for _ in takewhile(lambda block: block.block_hash is None, head))
        places = [place for place in self._under_way.values() if place is not None]
        safe = min([*places, self._gone + self._reached]) - self._gone
        return blanks + max(0, safe) - step

    @property
    def _reached(self) -> int:
        """Cached blocks at the head that were looked at."""
        looked, laid = self._victims.looked, len(self._victims)
        return looked if looked < laid else laid + self._scan.reached

    def _begin(self, placed: Sequence[Placed], advice: EvictionRanking | None) -> int:
        """Begin to copy as many blocks as there is room for; returns how many."""
        placed = [each for each in placed if hash_of(each[1])]  # a victim may have lost its hash
        ledger = self._ledger
        room = ledger.make_room(len(placed), demote_first(ledger, advice, len(placed)))
        if not room:
            return 0
        blocks = [block for _, block in placed[:room]]
        full_hashes = [block.block_hash for block in blocks]
        keys, copies = keys_in_pool(full_hashes), ledger.begin_copies(full_hashes)
        self._under_way.update(zip(keys, (place for place, _ in placed), strict=False))
        begun, at_step = list(zip(keys, blocks, full_hashes, copies, strict=True)), self._lead.steps
        job = Spill(
            ledger.book.number(),
            tuple([block.block_id for block in blocks]),
            tuple([copy.id for copy in copies]),
        )
        ledger.book.open(job, lambda done: self._ended(begun, at_step, done))
        return room

    def _ended(self, begun: list[Begun], at_step: int, done: JobDone) -> None:
        ledger = self._ledger
        self._lead.ended(at_step)
        ledger.costs.spilled(done.bytes, done.seconds)
        if done.failed:
            self._rest_until = ledger.clock() + _REST_S
            self.look_again()
        whole: list[Copy] = []
        for at, (key, block, full_hash, copy) in enumerate(begun):
            self._under_way.pop(key, None)
            # ``is``: a block that was evicted and filled again carries an equal hash at best.
            if block.block_hash is full_hash and at not in done.failed:
                whole.append(copy)
            else:
                ledger.counts.spill_failed += at in done.failed
                ledger.directory.abandon(copy)
        ledger.complete_copies(whole)


def _without_copy(
    pool: BlockPool, ledger: TierLedger, full_hashes: Sequence[bytes]
) -> list[tuple[KVCacheBlock, int]]:
    """Return blocks of the prefix cache that have no copy, with their keys."""
    found = map(pool.cached_block_hash_to_block.get_one_block, full_hashes)
    return [
        (block, key_in_pool(full_hash))
        for full_hash, block in zip(full_hashes, found, strict=True)
        if block is not None and full_hash[:-GROUP_BYTES] not in ledger.directory
    ]
