"""``TierLedger``: the tiers as the scheduler sees them: directory, jobs, costs, counters."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import repeat
from typing import Final

from ...graph.logs.reasons import Cause
from ...graph.types import Tier
from ...graph.wire.events import AnyEvent, BlocksSpilled, CopiesDropped, TierReport
from ..keys import GROUP_BYTES, keys_in_pool, pack_hashes
from .costs import TransferCosts
from .directory import Copy, CopyDirectory
from .jobs import Demote, JobBook, JobDone, WorkerStart

_AT_ONCE: Final = 64  # copies in one write; chosen


class DiskWrites:
    """Starts writes to the workers' disks, and handles their completion."""

    def __init__(self, ledger: TierLedger) -> None:
        self._ledger = ledger
        self._under_way: set[int] = set()  # copies, by their ids

    @property
    def idle(self) -> bool:
        return not self._under_way

    @property
    def room(self) -> int:
        return min(_AT_ONCE, self._ledger.directory.cold_capacity) - len(self._under_way)

    def demote(self, count: int, first: Iterable[bytes]) -> None:
        """Demote up to ``count`` copies; drop those that need not or must not be on disk."""
        count = min(count, self.room)
        if count <= 0:
            return
        directory = self._ledger.directory
        victims = directory.victims(count, first)
        # What stands twice will have a copy again when it leaves.
        once = [copy for copy in victims if not directory.stands_twice(copy.block_hash)]
        new = list(filter(self._is_to_write, once))
        demoting = {copy.id for copy in new}
        self._ledger.give_up([copy for copy in victims if copy.id not in demoting])
        self._begin(new, stays=False)

    def keep(self, copies: Sequence[Copy]) -> None:
        new = list(filter(self._is_to_write, copies))
        self._begin(new[: max(0, self.room)], stays=True)

    def _is_to_write(self, copy: Copy) -> bool:
        has = self._ledger.directory.is_cold(copy.block_hash) or copy.id in self._under_way
        return copy.may_demote and not has

    def _begin(self, copies: list[Copy], stays: bool) -> None:
        if not copies:
            return
        for copy in copies:
            copy.pins += 1
        ids = tuple(copy.id for copy in copies)
        self._under_way.update(ids)
        self._make_room()
        book = self._ledger.book
        job = Demote(book.number(), ids, tuple(copy.block_hash for copy in copies))
        book.open(job, lambda done: self._ended(copies, stays, done))

    def _ended(self, copies: list[Copy], stays: bool, done: JobDone) -> None:
        self._under_way.difference_update(copy.id for copy in copies)
        ledger, directory = self._ledger, self._ledger.directory
        directory.unpin_all(copies)
        kept = directory.still_found(copies)
        refused = {copies[at].id for at in done.failed}
        written = [copy.block_hash for copy in kept if copy.id not in refused]
        # Cleared meanwhile: what was written no longer counts.
        ledger.lose_cold([copy.block_hash for copy in copies if copy not in kept], Cause.RESET)
        for block_hash in written:
            directory.add_cold(block_hash)
        ledger.counts.demoted += len(written)
        ledger.announce(written, Tier.COLD)
        if not stays:
            # A copy that the disk did not take goes all the same: memory is what is short.
            ledger.give_up(kept, Cause.NOT_TAKEN)
            ledger.counts.dropped -= len(written)

    def _make_room(self) -> None:
        """Make room for writes under way: the disk would choose its own victims."""
        ledger, directory = self._ledger, self._ledger.directory
        excess = directory.cold_blocks + len(self._under_way) - directory.cold_capacity
        if excess > 0:
            gone = directory.oldest_cold(excess)
            ledger.counts.dropped += len(gone)
            ledger.lose_cold(gone)


_ANNOUNCED_AT_ONCE = 65_536  # keys per event; chosen
_PATIENCE_S = 1.0  # shortest time that others wait for a load, in seconds; chosen
_USUAL_TIMES = 2.0  # plus this many times a load's usual duration; chosen
_LOW_WATER = 16  # with a disk, one record in this many is kept free; chosen


@dataclass(slots=True)
class TierCounts:
    """Counts of blocks, requests or seconds since the engine's start; see ``events.TierReport``."""

    spilled: int = 0
    spill_lost: int = 0
    spill_failed: int = 0
    passed_over: int = 0
    demoted: int = 0
    dropped: int = 0
    loaded: int = 0
    load_failed: int = 0
    stalls: int = 0
    stall_s: float = 0.0
    recomputed: int = 0
    prefetched: int = 0
    prefetch_useful: int = 0
    prefetch_wasted: int = 0
    prefetch_cancelled: int = 0
    shared: int = 0
    share_failed: int = 0
    store_loaded: int = 0
    store_failed: int = 0

    def since(self, before: TierCounts) -> TierCounts:
        names = (field.name for field in fields(self))
        return TierCounts(**{name: getattr(self, name) - getattr(before, name) for name in names})


class TierLedger:
    """The WARM and COLD tiers as the scheduler sees them; one thread changes them."""

    def __init__(
        self,
        block_bytes: int,  # bytes of one block on one worker
        workers: int,  # how many workers answer for each job
        emit: Callable[[AnyEvent], None],  # takes each event for the sidecar; must not wait
        clock: Callable[[], float],  # monotonic seconds
        costs: TransferCosts,  # measured costs of moving and computing blocks
        plain: bool = False,  # keep the most recently used copies, whatever the graph knows of them
        compiled: bool = False,  # whether the compiled core keeps the copies in memory
    ) -> None:
        self.block_bytes = block_bytes
        self.directory = CopyDirectory(plain=plain, compiled=compiled)
        self.book = JobBook(workers)
        self.costs = costs
        self.counts = TierCounts()
        self.reads_store = False  # whether this engine reads a store that others share
        # Hashes of blocks that a load is bringing back, and until when other requests wait.
        self.coming: dict[bytes, float] = {}
        # Keys of blocks that left the pool, and are copied before a load overwrites them.
        self.saving: set[int] = set()
        # Keys of blocks in the pool of which no copy may outlive this process: a LoRA adapter
        # computed them, which may be trained further under its name, or they are a session's own
        # approximate ones.
        self.kept_off_disk: set[int] = set()
        # How many tokens of each approximate request that runs are exact, by its id.
        self.exact: dict[str, int] = {}
        # Keys of blocks that get a copy even if the sidecar does not ask for one, oldest first.
        self.wanted: dict[int, None] = {}
        self.clock = clock
        self._emit = emit
        self.disk = DiskWrites(self)  # writes to the disk
        self._was_cleared = False

    def expect(self, hashes: Sequence[bytes], *sizes: int) -> None:
        """Note that a load of ``sizes`` bytes begins: others wait for it unless it is too slow."""
        usual_s = self.costs.load_s(*sizes)
        until = self.clock() + _PATIENCE_S + _USUAL_TIMES * usual_s
        self.coming.update(dict.fromkeys(hashes, until))

    def arrived(self, hashes: Sequence[bytes]) -> None:
        deque(map(self.coming.pop, hashes, repeat(None)), maxlen=0)

    def make_room(self, count: int, first: Iterable[bytes]) -> int:
        """Return how many of ``count`` copies can be started, dropping or demoting for them."""
        directory = self.directory
        missing = count - directory.room
        if directory.cold_capacity:
            self.disk.demote(missing + directory.warm_capacity // _LOW_WATER, first)
        elif missing > 0:
            self._dropped(directory.victims(missing, first), Cause.ROOM)
        return min(count, directory.room)

    def make_way(self, chain: Sequence[bytes]) -> None:
        """Drop the least recently used copies, so that the parts of ``chain`` that must be read fit
        into memory; copies that are also on disk go first.

        The other dropped copies are lost rather than written to disk, because that takes steps and
        the load must be answered now. They might be needed again; ``chain`` is needed now.
        """
        directory = self.directory
        found = directory.pinned(chain)
        if (missing := found.count(None) - directory.room) > 0:
            oldest = directory.victims(2 * missing, ())
            oldest.sort(key=lambda copy: not directory.is_cold(copy.block_hash))
            self.give_up(oldest[:missing])
        directory.unpin_all(filter(None, found))

    def begin_copies(self, full_hashes: Sequence[bytes]) -> list[Copy]:
        """Start copies of blocks, by their hashes with the cache's group id; there must be room."""
        kept_off = self.kept_off_disk
        may_demote: Sequence[bool] = (True,)
        if kept_off:
            may_demote = [key not in kept_off for key in keys_in_pool(full_hashes)]
        hashes = [full_hash[:-GROUP_BYTES] for full_hash in full_hashes]
        return self.directory.begin_all(hashes, may_demote)

    def complete_copies(self, copies: Sequence[Copy]) -> None:
        hashes = self.directory.complete_all(copies)
        self.counts.spilled += len(hashes)
        self.announce(hashes, Tier.WARM)

    def give_up(self, copies: Sequence[Copy], cause: Cause = Cause.ROOM) -> None:
        """Drop complete copies; those that were replaced meanwhile are gone already."""
        self._dropped(self.directory.still_found(copies), cause)

    def _dropped(self, copies: Sequence[Copy], cause: Cause) -> None:
        if copies:
            self.counts.dropped += len(copies)
            self.announce_dropped(self.directory.drop_all(copies), Tier.WARM, cause)

    def lose_cold(self, hashes: Sequence[bytes], cause: Cause = Cause.ROOM) -> None:
        """Forget copies whose records on disk are gone; report them as dropped for ``cause``."""
        for block_hash in hashes:
            self.directory.drop_cold(block_hash)
        self.announce_dropped(hashes, Tier.COLD, cause)

    def clear(self) -> None:
        """Drop everything: the engine's prefix cache was reset, perhaps for new weights."""
        warm, cold = self.directory.warm_hashes(), self.directory.cold_hashes()
        self._was_cleared = True
        self.directory.clear()
        self.kept_off_disk.clear()
        self.wanted.clear()
        self.announce_dropped(warm, Tier.WARM, Cause.RESET)
        self.announce_dropped(cold, Tier.COLD, Cause.RESET)

    def started(self, starts: Sequence[WorkerStart]) -> None:
        """Adopt the workers' capacities (the smallest of each) and the records that are on every
        disk. If a reset came first, the records may be of older weights and are erased.
        """
        directory = self.directory
        directory.warm_capacity = min(start.warm_capacity for start in starts)
        directory.cold_capacity = min(start.cold_capacity for start in starts)
        on_disk = [set(start.on_disk) for start in starts]
        for block_hash in sorted(set.intersection(*on_disk))[: directory.cold_capacity]:
            directory.add_cold(block_hash)
        if self._was_cleared:
            directory.clear()

    # For the sidecar ----------------------------------------------------------------------------

    def announce(self, hashes: Sequence[bytes], tier: Tier) -> None:
        for event in copied_events(hashes, tier, self.block_bytes):
            self._emit(event)

    def announce_dropped(self, hashes: Sequence[bytes], tier: Tier, cause: Cause) -> None:
        if hashes:
            self._emit(CopiesDropped(pack_hashes(hashes), int(tier), int(cause)))

    def all_copies(self) -> list[AnyEvent]:
        """Return events for every copy, for a resync; safe to call from any thread."""
        directory = self.directory
        return [
            *copied_events(directory.warm_hashes(), Tier.WARM, self.block_bytes),
            *copied_events(directory.cold_hashes(), Tier.COLD, self.block_bytes),
        ]

    def report(self) -> TierReport:
        directory, costs = self.directory, self.costs
        return TierReport(
            bytes_per_block=self.block_bytes,
            warm_blocks=directory.warm_blocks,
            warm_capacity=directory.warm_capacity,
            cold_blocks=directory.cold_blocks,
            cold_capacity=directory.cold_capacity,
            load_bytes_per_s=costs.load_bytes_per_s,
            spill_bytes_per_s=costs.spill_bytes_per_s,
            prefill_tokens_per_s=costs.prefill_tokens_per_s,
            **asdict(self.counts),
            reads_store=self.reads_store,
        )


def copied_events(hashes: Sequence[bytes], tier: Tier, block_bytes: int) -> list[AnyEvent]:
    """Return events which state that blocks have copies in a tier."""
    return [
        BlocksSpilled(
            pack_hashes(hashes[start : start + _ANNOUNCED_AT_ONCE]), int(tier), block_bytes
        )
        for start in range(0, len(hashes), _ANNOUNCED_AT_ONCE)
    ]
