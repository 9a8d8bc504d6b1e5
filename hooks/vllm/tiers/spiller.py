"""Copies blocks to host memory ahead of their eviction, so that the engine never waits for it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import compress, islice, repeat, takewhile
from operator import attrgetter, is_, not_
from typing import TYPE_CHECKING, Final, NamedTuple, cast

import numpy as np

from ....graph.types import Keys, as_keys
from ....graph.wire.advice import EvictionRanking
from ...keys import GROUP_BYTES, key_in_pool, keys_in_pool
from ...link.mailbox import NOBODY, Finds
from ...tiers.directory import Copy, Marks
from ...tiers.jobs import Finish, JobDone, Spill
from ...tiers.ledger import TierLedger
from ..free_queue.window import Victims
from ..index import FoundBlocks, hash_of

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    from ...._engine import Core
    from ...tiers.costs import TransferCosts
    from ...tiers.directory import CopyDirectory

# ``CopyLead``: how many of the blocks that are about to be evicted should have copies.

_STEPS_AHEAD: Final = 3  # a copy started this early is usually complete in time; chosen
_LEAST_AHEAD: Final = 8  # fewest blocks examined ahead of need; chosen
_MOST_AHEAD: Final = 0.375  # of the memory, for copies that the next step does not need; chosen
_AHEAD_PER_POOL: Final = 0.25  # … and this share for each pool that the memory could hold; chosen
_NEWEST: Final = 0.2  # weight of the newest sample in a mean; chosen
_WORK_S: Final = 0.25  # a step takes no longer; the remainder was idle time; chosen
_MEMORY_S: Final = 5.0  # seconds of work in which the largest step seen fades to 1/e; chosen


class CopyLead:
    """Tracks how many blocks steps and loads take, and how long copies take."""

    def __init__(self, now: float) -> None:
        # Blocks that the largest step of late took to compute, and the largest loads of late at
        # once; they fade while the engine works.
        self.step = self.load = 0.0
        self.steps = 0
        self._seen_at, self._late = now, 0.0  # late: steps that a spill takes, mean

    def stepped(self, taken: int, loads: int, now: float) -> None:
        """Note that a step took ``taken`` blocks to compute and ``loads`` blocks for loads."""
        fade = math.exp(-min(now - self._seen_at, _WORK_S) / _MEMORY_S)
        self.step, self.load = max(float(taken), fade * self.step), max(loads, fade * self.load)
        self._seen_at, self.steps = now, self.steps + 1

    def passed(self, steps: Iterable[PassedStep]) -> None:
        """Note several steps without loads in one call; as ``stepped`` for each."""
        step, load, seen_at = self.step, self.load, self._seen_at
        for taken, _, now in steps:
            fade = math.exp(-min(now - seen_at, _WORK_S) / _MEMORY_S)
            step, load, seen_at = max(float(taken), fade * step), fade * load, now
            self.steps += 1
        self.step, self.load, self._seen_at = step, load, seen_at

    def ended(self, began: int) -> None:
        """Note the end of a spill that started after ``began`` steps."""
        self._late += _NEWEST * (self.steps - began - self._late)

    def blocks(self, wanted: int, directory: CopyDirectory, pool: int) -> int:
        """Return how many blocks at the queue's head should have copies.

        Covers all blocks that steps may overwrite before a spill that starts now would end; blocks
        given to a load are copied before the load writes to them. More copies would help larger
        steps and prefetches. But a copy of a block that is still in the pool displaces a copy of
        one that is not, and more so the smaller the memory is. Beyond the memory's capacity, copies
        would replace each other endlessly.
        """
        memory = directory.warm_capacity
        needed = int(min(1.0 + self._late, _STEPS_AHEAD) * self.step)
        ample = int(_STEPS_AHEAD * self.step) + wanted
        affordable = int(min(_MOST_AHEAD, _AHEAD_PER_POOL * memory / pool) * memory)
        affordable += directory.room
        return min(_LEAST_AHEAD + max(needed, min(ample, affordable)), memory)


# ``Rest``: steps in which the tiers have nothing to decide.

_LONGEST_REST: Final = 64  # steps after which whatever depends on time alone is checked; chosen


PassedStep = tuple[int, int, float]
"""A step without a decision: the blocks that it took, the cached ones among them, and its time."""


class Rest:
    """Tracks how long there is nothing to decide: until steps have taken some of the examined
    blocks, or another call comes.
    """

    def __init__(self, block_size: int, costs: TransferCosts, clock: Callable[[], float]) -> None:
        self._block_size, self._costs, self._clock = block_size, costs, clock
        # cached blocks that steps may take until then; below 0: the next step decides
        self.left = -1
        # what there was to prefetch in the last step that decided; another one ends the rest
        self.order: Keys | None = None
        self.steps: list[PassedStep] = []  # those since then
        self._most = 0.0

    def begin(self, left: int, most: float) -> None:
        """Start a rest that lasts until steps have taken ``left`` cached blocks, or one step takes
        more than ``most`` blocks of any kind.
        """
        self.left, self._most = left, most

    def passes(self, tokens: int, evicted: int) -> bool:
        """Note a step that computes ``tokens`` and evicted ``evicted`` blocks, if it leaves nothing
        to decide; returns whether it does. Written as one function, since most steps are this call.
        """
        taken = max(1 + tokens // self._block_size, evicted)
        if evicted > self.left or taken > self._most or len(self.steps) >= _LONGEST_REST:
            return False
        self.left -= evicted
        now = self._clock()
        self.steps.append((taken, evicted, now))
        self._costs.step_began(tokens, now)
        return True


# ``QueueScan``: scans the head of the free queue, a limited number of blocks per step.

_LEAST: Final = 64  # fewest blocks examined per step; chosen
_TIMES_TAKEN: Final = 3  # more blocks examined per block taken: faster than the queue moves
_MOST_BLANKS: Final = 1024  # empty blocks skipped in one step; chosen
_NOTHING: Final = FoundBlocks.told([])
_id_of: Final = attrgetter("block_id")


class QueueScan:
    """Examines each cached block near the head of the free queue once.

    An examined block stays in place until the engine takes it or a hit removes it, and freed blocks
    go behind all others. Only advice inserts blocks before the last examined one: the code that
    does so calls ``start_again``, and ``Victims.look`` examines the inserted blocks.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.reached = 0  # cached blocks that stand before the next one
        self.at_end = False  # whether none stood behind the last one when that was looked at
        self.core: Core | None = None  # walks the queue, where the engine has a compiled core
        self._pool = pool
        self._last: KVCacheBlock | None = None  # that was looked at
        self._before: KVCacheBlock | None = None  # the same, a step ago
        self._is_lost = False  # a hit took it
        self._seen: set[int] = set()  # ids of those that stand before the next one, or stood there

    def start_again(self) -> None:
        """Start again at the head, or behind the blocks that advice moved there."""
        self._last, self._is_lost, self.reached, self.at_end = None, False, 0, False
        self._seen.clear()

    def touched(self, blocks: Iterable[KVCacheBlock]) -> None:
        if self._last is not None:
            hit = self._seen.intersection(map(_id_of, blocks))
            self._seen -= hit
            self.reached = max(0, self.reached - len(hit))
            self._is_lost |= self._last.block_id in hit

    def evicted(self, count: int) -> bool:
        """Note that ``count`` cached blocks left at the head; returns whether the scan must start
        again there, because the last examined block is gone from its place.
        """
        self.reached = max(0, self.reached - count)
        last = self._last
        return last is not None and (
            self._is_lost or last.ref_cnt > 0 or last.next_free_block is None
        )

    def look(self, ahead: int, taken: int, behind: KVCacheBlock | None = None) -> FoundBlocks:
        """Return this step's share of the next ``ahead`` cached blocks, in the queue's order. The
        step took ``taken`` blocks from the head; advice moved the blocks up to ``behind`` there.
        """
        count = min(ahead - self.reached, _LEAST + _TIMES_TAKEN * taken)
        if self._last is None:
            self._last = behind
        self._before = self._last
        found = self._next_cached(count) if count > 0 else _NOTHING
        self.at_end = count > 0 and self._last is self._before
        self.reached += len(found.blocks)
        self._seen.update(found.ids.tolist())
        return found

    def _next_cached(self, count: int) -> FoundBlocks:
        if self.core is not None:
            blocks, hashes, ids, self._last = self.core.scan(self._last, count, _MOST_BLANKS)
            return FoundBlocks.told(blocks, hashes, np.frombuffer(ids, np.int64))
        found: list[KVCacheBlock] = []
        blanks, walk = _MOST_BLANKS, self._pool.free_block_queue.iter_blocks_after(self._last)
        while len(found) < count and blanks:
            passed = list(islice(walk, min(count - len(found), blanks)))
            if not passed:
                break
            self._last = passed[-1]
            cached = list(compress(passed, map(hash_of, passed)))
            blanks -= len(passed) - len(cached)
            found += cached
        return FoundBlocks.told(found)

    def back_to(self, found: Sequence[KVCacheBlock], at: int) -> None:
        """Examine ``found[at]`` and the blocks after it, of the last ``look``, again in the next
        step.
        """
        self._last = found[at - 1] if at else self._before
        self.reached -= len(found) - at


# ``CopyMarks``: which blocks are worth a copy before they are evicted.


class CopyMarks:
    """Which blocks the advice considers worth a copy. ``wanted`` keys are worth one whatever the
    sidecar says. Without advice, all are.
    """

    def __init__(self, pool_blocks: int, finds: Finds, wanted: Collection[int] = ()) -> None:
        self._wanted, self._finds = wanted, finds
        self._advised: Keys | None = None  # as it came
        self._ascending: Keys | None = None  # the same keys
        self._worth = self._none = np.zeros(pool_blocks, dtype=np.uint64)
        self._elsewhere: Collection[int] = ()
        self._passed = np.zeros(pool_blocks, dtype=np.bool_)

    def follow(self, ranking: EvictionRanking | None) -> bool:
        """Adopt advice; returns whether it recommends copies of blocks that were passed over
        before.
        """
        advised = None if ranking is None else ranking.spill_first
        if advised is self._advised:
            return False
        self._advised = advised
        if ranking is None or advised is None:
            self._ascending = None
            return bool(self._passed.any())
        keys, blocks = ranking.spill_keys, ranking.spill_blocks
        self._ascending = np.sort(advised) if keys is None else keys
        if blocks is None:
            blocks = self._finds(advised)
        self._elsewhere = frozenset(advised[blocks == NOBODY].tolist())
        self._worth = self._none.copy()
        self._worth[blocks] = advised
        return bool(self._passed[blocks].any())

    def forget_passed(self) -> None:
        """Note that all blocks will be examined again."""
        self._passed[:] = False

    def worth(self, keys: list[int]) -> int:
        """Return how many of ``keys`` are worth a copy; safe from another thread."""
        known = self._ascending
        if known is None:
            return len(keys)
        some = as_keys(keys)
        return int((np.searchsorted(known, some, "right") > np.searchsorted(known, some)).sum())

    @property
    def latest(self) -> Marks | None:
        """The advice as marks; None without any, when all blocks are worth a copy."""
        if self._advised is None:
            return None
        return Marks(self._worth, self._passed, self._elsewhere, self._wanted)


# ``LoadVictims``: copies the blocks that a load is about to overwrite.


class LoadVictims:
    """Copies the blocks that the pool gives to a load, before the load overwrites them.

    A step writes at once to the blocks that it computes. A load gets all its blocks in one step,
    and nothing writes to them before it does. So these need no copy ahead of time: the thread that
    runs the load copies them first.
    """

    def __init__(self, pool: BlockPool, ledger: TierLedger, marks: CopyMarks) -> None:
        self._pool, self._ledger, self._marks = pool, ledger, marks
        self.core: Core | None = None  # reads the queue, where the engine has a compiled core
        self._count = 0  # blocks that a load would be given
        self._freed = True  # whether blocks were given back since a load was foreseen
        self._head: list[KVCacheBlock] = []  # those blocks, and
        self._hashes: list[bytes | None] = []  # their hashes
        self.advice: EvictionRanking | None = None  # the latest: what copies make room

    def freed(self) -> None:
        """Note that blocks were freed: there may be room now for a waiting request."""
        self._freed = True

    def foresee(self, count: int) -> None:
        """Note that a load may be given the next ``count`` blocks; 0: no load will be.

        vLLM asks in every step while a request waits for room. If it found none and nothing was
        freed since, it finds none again, and nothing is examined.
        """
        if count and count == self._count and not self._freed:
            self._head, self._hashes = [], []  # others may have written to some of them
        else:
            self._freed = False
            self.prepare(count)

    def fit(self, count: int) -> bool:
        """Return whether the pool has ``count`` free blocks for a load."""
        free: int = self._pool.get_num_free_blocks()
        return count <= free

    def prepare(self, count: int) -> None:
        """Note that a load is given the next ``count`` blocks, if there are so many."""
        self._count = count if self.fit(count) else 0
        self.look()

    def look(self) -> None:
        """Record what those blocks hold, because the blocks at the queue's head may have
        changed.
        """
        if not self._count:
            self._head, self._hashes = [], []
        elif self.core is not None:
            self._head, self._hashes = self.core.head(self._count)
        else:
            head = self._pool.free_block_queue.iter_blocks_after(None)
            self._head = list(islice(head, self._count))
            self._hashes = list(map(hash_of, self._head))

    def save(self, block_ids: Iterable[int], load_ended: Finish) -> Finish:
        """Start copying what a load's blocks held, if worth it and if there is room. Must be called
        after the load was given its blocks and before it is ordered. Returns a callback for the end
        of the load, which calls ``load_ended`` too.

        A copy that is incomplete by then counts as failed: once the load is given up, others may
        write to its blocks.
        """
        given, blocks, hashes = set(block_ids), self._head, self._hashes
        self._count, self._head, self._hashes = 0, [], []
        if not given.issuperset(map(_id_of, blocks)) or None in hashes:
            pairs = zip(blocks, hashes, strict=True)
            is_taken = [held is not None and block.block_id in given for block, held in pairs]
            blocks, hashes = list(compress(blocks, is_taken)), list(compress(hashes, is_taken))
        held = cast("list[bytes]", hashes)
        ledger, directory = self._ledger, self._ledger.directory
        found = FoundBlocks.told(blocks, held)
        lost, _ = directory.lacking(held, found.ids, self._marks.latest, {}, 0)
        room = ledger.make_room(len(lost), demote_first(ledger, self.advice, len(lost)))
        # Those that came last would have stayed longest.
        return self._begin(found, lost[-room:], load_ended) if room else load_ended

    def _begin(self, found: FoundBlocks, lost: Sequence[int], load_ended: Finish) -> Finish:
        ledger = self._ledger
        hashes = [found.hashes[at] for at in lost]
        keys, copies = keys_in_pool(hashes), ledger.begin_copies(hashes)
        ledger.saving.update(keys)
        ids = tuple([found.blocks[at].block_id for at in lost])
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


_MOST_UNDER_WAY: Final = 256  # blocks, or four times what the largest step took; chosen
_AT_ONCE: Final = 0.25  # share of the blocks that should have copies, examined together; chosen
_MOST_AT_ONCE: Final = _LEAST_AHEAD  # examined together at most, as many as are always examined
_AGAIN_AFTER: Final = 4096  # evictions after which all blocks near the head are examined; chosen
_REST_S: Final = (
    1.0  # seconds without spills after a failed copy, so that an engine can fall idle; chosen
)


class StartedCopies(NamedTuple):
    """Blocks whose copies were started, with their keys, and with their hashes at that time."""

    keys: Sequence[int]
    blocks: Sequence[KVCacheBlock]
    full_hashes: Sequence[bytes]
    copies: Sequence[Copy]


class StepTaken(NamedTuple):
    """What an engine's step took: the tokens computed, the cached blocks evicted for it, and the
    protected blocks moved off the head since the engine's start.
    """

    tokens: int
    evicted: int = 0
    held_back: int = 0


class Spiller:
    """Watches the head of the free queue, where the next victims are.

    A spill reads a block that no request holds. The copy counts only if the block still carries the
    same hash object when every worker is done: the scheduler sees an eviction before any worker can
    overwrite the block, so a torn copy is never found.
        freed: Told when blocks were given back.
        may_pass: Cached blocks that steps may take before there is work to do, while nothing
            else happens; below 0: there is work in any case.
    """

    def __init__(self, pool: BlockPool, ledger: TierLedger, finds: Finds, spill_all: bool) -> None:
        self._pool, self._ledger, self._spill_all = pool, ledger, spill_all
        self.marks = CopyMarks(len(pool.blocks), finds, ledger.wanted)
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
        self._is_behind = False  # some that were looked at could not be copied yet
        self.may_pass = -1  # see ``Rest.left``

    def step(
        self, ranking: EvictionRanking | None, taken: int, loads: int, wanted: int, step: StepTaken
    ) -> int:
        """Start copying blocks that are about to be evicted; returns how many can be evicted
        without a loss. The step took ``taken`` blocks from the pool to compute, blank ones
        included, and ``loads`` for loads; a prefetch would take ``wanted`` blocks.
        """
        self.load_victims.advice = ranking
        self._note_what_changed(ranking, step)
        now, directory = self._ledger.clock(), self._ledger.directory
        self._lead.stepped(taken, loads, now)
        ahead = self._lead.blocks(wanted, directory, self._pool.num_gpu_blocks)
        # An idle step asks no advice which copies make room: if it contradicted itself, copies
        # would replace each other for ever, and the engine would never rest.
        # A few together cost as much as one. A prefetch takes no block that was not looked at.
        together = 0 if wanted else min(_MOST_AT_ONCE, int(_AT_ONCE * ahead))
        if self._is_behind or ahead - self._reached > together:
            self._look(ahead, taken + loads, now, ranking if step.tokens else None)
        self.may_pass = -1 if self._is_behind else self._may_pass(ahead - together)
        return self._spare(wanted) if wanted else 0

    def _may_pass(self, least: int) -> int:
        """How many more may be taken while at least so many must have been looked at; too few where
        that is not known: a step that finds nothing to do changes nothing.
        """
        left = self._reached - least
        if len(self._victims) and self._scan.reached:
            left //= 2  # each that goes counts in both
        if self._scan.at_end:
            left = max(0, left)  # all blocks behind were freed later
        return min(left, _AGAIN_AFTER - (self._gone - self._gone_then))

    @property
    def usual(self) -> float:
        """Most blocks that a step can take before more blocks must be examined."""
        return self._lead.step

    def passed(self, steps: Sequence[PassedStep]) -> None:
        """Note steps in which there was nothing to do."""
        self._lead.passed(steps)
        evicted = sum([evicted for _, evicted, _ in steps])
        self._gone += evicted
        self._scan.evicted(evicted)
        self._let_go()

    def scans_with(self, core: Core) -> None:
        """Scan the queue with a compiled core."""
        self._scan.core = self.load_victims.core = core

    def copy(self, hashes: Sequence[bytes], group: bytes) -> None:
        """Start copying blocks of the pool now, as far as there is room; ``group`` is the ending of
        their keys in the prefix cache.
        """
        if hashes and self._ledger.clock() >= self._rest_until:
            found = _without_copy(self._pool, self._ledger, [each + group for each in hashes])
            lacking = [(block, key) for block, key in found if key not in self._under_way]
            if lacking:
                blocks, keys = zip(*lacking, strict=True)
                self._begin(blocks, keys, repeat(None), None)

    def gone(self, keys: Sequence[int]) -> None:
        """Note that the engine evicted ``keys``; may run on any thread, since it only reads the
        ledger.
        """
        directory, counts = self._ledger.directory, self._ledger.counts
        saving = self._ledger.saving
        hashes = directory.hashes_of(keys)
        if directory.holds_twice():
            self._left.extend(filter(directory.stands_twice, filter(None, hashes)))
        if None not in hashes:
            return
        lost = [key for key in compress(keys, map(not_, hashes)) if key not in saving]
        worthy = self.marks.worth(lost)
        counts.spill_lost += worthy
        counts.passed_over += len(lost) - worthy

    def laid_more(self, victims: Victims, at_head: bool) -> None:
        """Note that advice moved blocks to the queue's head, or behind the ``victims`` already
        there.
        """
        self._victims = victims
        if at_head:
            self.look_again()
        else:
            self._scan.start_again()

    def touched(self, blocks: Sequence[KVCacheBlock]) -> None:
        self._scan.touched(blocks)
        self.load_victims.look()

    def look_again(self) -> None:
        """Examine all blocks near eviction once more."""
        self._scan.start_again()
        self._victims.looked = 0
        self.marks.forget_passed()
        self._gone_then = self._gone
        self._under_way = dict.fromkeys(self._under_way)

    def _note_what_changed(self, ranking: EvictionRanking | None, step: StepTaken) -> None:
        self._victims.drop_taken()
        self._let_go()
        news = self.marks.follow(None if self._spill_all else ranking)
        news |= step.held_back != self._held_back
        self._held_back = step.held_back
        self._gone += step.evicted
        news |= self._scan.evicted(step.evicted)
        if news or self._gone - self._gone_then > _AGAIN_AFTER:
            self.look_again()

    def _let_go(self) -> None:
        """Note of the blocks that left that their copies are the only ones now."""
        if count := len(self._left):  # more may come meanwhile
            take = self._left.popleft
            self._ledger.directory.all_leave([take() for _ in range(count)])

    def _look(self, ahead: int, taken: int, now: float, advice: EvictionRanking | None) -> None:
        """Look at the next of what is about to go: at what advice laid there, and behind it."""
        victims, scan, left = self._victims, self._scan, 0
        if victims.looked < min(ahead, len(victims)):
            first = victims.looked
            left = self._copy(victims.look(ahead - first), first, now, advice)
            victims.looked -= left
        elif blocks := (found := scan.look(ahead - len(victims), taken, victims.last)).blocks:
            first = len(victims) + scan.reached - len(blocks)
            if left := self._copy(found, first, now, advice):
                scan.back_to(blocks, len(blocks) - left)
        self._is_behind = left > 0

    def _copy(
        self, found: FoundBlocks, first: int, now: float, advice: EvictionRanking | None
    ) -> int:
        """Begin to copy those of ``found`` that are worth it, the first of which stands at place
        ``first``; returns how many of the last must be looked at again.
        """
        first += self._gone
        lacking, keys = self._ledger.directory.lacking(
            found.hashes, found.ids, self.marks.latest, self._under_way, first
        )
        if not lacking:
            return 0
        most = max(_MOST_UNDER_WAY, 4 * int(self._lead.step)) - len(self._under_way)
        begun = 0
        if most > 0 and now >= self._rest_until:
            blocks = [found.blocks[at] for at in lacking[:most]]
            begun = self._begin(blocks, keys[:most], map(first.__add__, lacking), advice)
        return len(found.blocks) - lacking[begun] if begun < len(lacking) else 0

    def _spare(self, wanted: int) -> int:
        """How many blocks at the head the next step leaves that can go without a loss, as far as is
        known.
        """
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

    def _begin(
        self,
        blocks: Sequence[KVCacheBlock],
        keys: Sequence[int],
        places: Iterable[int | None],
        advice: EvictionRanking | None,
    ) -> int:
        """Begin to copy as many blocks as there is room for; returns how many. ``places``: those of
        the blocks among all that ever left, if known.
        """
        ledger, hashes = self._ledger, list(map(hash_of, blocks))
        if None in hashes:  # a victim may have lost its hash
            stand = list(map(bool, hashes))
            blocks, keys = list(compress(blocks, stand)), list(compress(keys, stand))
            places, hashes = compress(places, stand), list(filter(None, hashes))
        room = ledger.make_room(len(blocks), demote_first(ledger, advice, len(blocks)))
        if not room:
            return 0
        blocks, keys, full_hashes = blocks[:room], keys[:room], hashes[:room]
        copies = ledger.begin_copies(full_hashes)
        self._under_way.update(zip(keys, places, strict=False))
        begun, at_step = StartedCopies(keys, blocks, full_hashes, copies), self._lead.steps
        ids = tuple([copy.id for copy in copies])
        job = Spill(ledger.book.number(), tuple(map(_id_of, blocks)), ids)
        ledger.book.open(job, lambda done: self._ended(begun, at_step, done))
        return room

    def _ended(self, begun: StartedCopies, at_step: int, done: JobDone) -> None:
        ledger = self._ledger
        self._lead.ended(at_step)
        ledger.costs.spilled(done.bytes, done.seconds)
        if done.failed:
            self._rest_until = ledger.clock() + _REST_S
            self.look_again()
        deque(map(self._under_way.pop, begun.keys, repeat(None)), maxlen=0)
        # ``is``: a block that was evicted and filled again carries an equal hash at best.
        stands = list(map(is_, map(hash_of, begun.blocks), begun.full_hashes))
        for at in done.failed.intersection(range(len(stands))):
            ledger.counts.spill_failed += 1
            stands[at] = False
        if all(stands):
            ledger.complete_copies(begun.copies)
            return
        for copy in compress(begun.copies, map(not_, stands)):
            ledger.directory.abandon(copy)
        ledger.complete_copies(list(compress(begun.copies, stands)))


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
