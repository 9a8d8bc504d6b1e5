"""What the scheduler's tier decisions share: the copies' directory, open jobs, costs, counters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields

from ...graph.logs.reasons import Cause
from ...graph.messages.events import AnyEvent, BlocksSpilled, CopiesDropped, TierReport
from ...graph.types import Tier
from ..keys import pack_hashes
from .costs import TransferCosts
from .directory import Copy, CopyDirectory
from .jobs import Demote, JobBook, JobDone, WorkerStart

_ANNOUNCED_AT_ONCE = 65_536  # keys per event; chosen
_DEMOTIONS_AT_ONCE = 64  # copies on their way to the disk; chosen
_PATIENCE_S = 1.0  # seconds that others wait for a load at least; chosen
_USUAL_TIMES = 2.0  # … and so many times as long as such a load usually takes; chosen
_LOW_WATER = 16  # with a disk, one record in so many is kept free; chosen


@dataclass(slots=True)
class TierCounts:
    """Blocks (or requests, or seconds) since the engine's start; see ``events.TierReport``."""

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
        """Return the counts since ``before``."""
        names = (field.name for field in fields(self))
        return TierCounts(**{name: getattr(self, name) - getattr(before, name) for name in names})


class TierLedger:
    """The WARM and COLD tiers as the scheduler sees them; one thread changes them.

    Attributes:
        coming: Hashes of blocks that a load is bringing back, and until when other requests wait.
        reads_store: Whether this engine reads a store that others share.
        adapted: Keys of blocks in the pool that a LoRA adapter computed. It may be trained
            further under its name: no copy of them may outlive this process.

    Args:
        block_bytes: Bytes of one block on one worker.
        workers: How many workers answer for each job.
        emit: Takes each event for the sidecar; must not wait.
        clock: Monotonic seconds.
        costs: What moving blocks and computing them takes.
        plain: Keep the most recently used copies, whatever the graph knows of them.
    """

    def __init__(
        self,
        block_bytes: int,
        workers: int,
        emit: Callable[[AnyEvent], None],
        clock: Callable[[], float],
        costs: TransferCosts,
        plain: bool = False,
    ) -> None:
        self.block_bytes = block_bytes
        self.directory = CopyDirectory(plain=plain)
        self.book = JobBook(workers)
        self.costs = costs
        self.counts = TierCounts()
        self.reads_store = False
        self.coming: dict[bytes, float] = {}
        self.adapted: set[int] = set()
        self.clock = clock
        self._emit = emit
        self._was_cleared, self._demoting = False, 0

    def expect(self, hashes: Sequence[bytes], *sizes: int) -> None:
        """Note that a load of so many bytes begins: others wait for it while it is not too slow."""
        usual_s = self.costs.load_s(*sizes)
        until = self.clock() + _PATIENCE_S + _USUAL_TIMES * usual_s
        self.coming.update(dict.fromkeys(hashes, until))

    def arrived(self, hashes: Sequence[bytes]) -> None:
        """Note that a load is over, whether it succeeded or not."""
        for block_hash in hashes:
            self.coming.pop(block_hash, None)

    def make_room(self, count: int, first: Iterable[bytes]) -> int:
        """How many copies of ``count`` can be begun now; gives up or demotes others for them.

        Args:
            count: Copies wanted.
            first: Hashes in the order in which copies go; after them, the least recently used.
        """
        directory = self.directory
        missing = count - directory.room
        if directory.cold_capacity:
            self._demote(missing + directory.warm_capacity // _LOW_WATER, first)
        elif missing > 0:
            self.give_up(directory.victims(missing, first))
        return min(count, directory.room)

    def give_up(self, copies: Sequence[Copy], cause: Cause = Cause.ROOM) -> None:
        """Drop complete copies; copies that were replaced meanwhile are gone already."""
        copies = [copy for copy in copies if self.directory.warm(copy.block_hash) is copy]
        for copy in copies:
            self.directory.drop(copy)
        self.counts.dropped += len(copies)
        self.announce_dropped([copy.block_hash for copy in copies], Tier.WARM, cause)

    def lose_cold(self, hashes: Sequence[bytes], cause: Cause = Cause.ROOM) -> None:
        """Drop records on disk."""
        for block_hash in hashes:
            self.directory.drop_cold(block_hash)
        self.announce_dropped(hashes, Tier.COLD, cause)

    def clear(self) -> None:
        """Drop everything: the engine's prefix cache was reset, perhaps for new weights."""
        warm, cold = self.directory.warm_hashes(), self.directory.cold_hashes()
        self._was_cleared = True
        self.directory.clear()
        self.adapted.clear()
        self.announce_dropped(warm, Tier.WARM, Cause.RESET)
        self.announce_dropped(cold, Tier.COLD, Cause.RESET)

    def started(self, starts: Sequence[WorkerStart]) -> None:
        """Take what the workers have: the least of each, and the records that are on every disk.

        After a reset that came first, the records may be of older weights: they are erased.
        """
        directory = self.directory
        directory.warm_capacity = min(start.warm_capacity for start in starts)
        directory.cold_capacity = min(start.cold_capacity for start in starts)
        on_disk = [set(start.on_disk) for start in starts]
        for block_hash in sorted(set.intersection(*on_disk))[: directory.cold_capacity]:
            directory.add_cold(block_hash)
        if self._was_cleared:
            directory.clear()

    def _demote(self, count: int, first: Iterable[bytes]) -> None:
        """Demote up to ``count`` copies; drop those that need not or may not be on disk."""
        count = min(count, min(_DEMOTIONS_AT_ONCE, self.directory.cold_capacity) - self._demoting)
        if count <= 0:
            return
        directory = self.directory
        victims = directory.victims(count, first)
        new = [copy for copy in victims if self._is_to_demote(copy)]
        demoting = {copy.id for copy in new}
        self.give_up([copy for copy in victims if copy.id not in demoting])
        if new:
            self._begin_demotion(new)

    def _is_to_demote(self, copy: Copy) -> bool:
        directory, block_hash = self.directory, copy.block_hash
        twice = directory.stands_twice(block_hash)  # it will have a copy again when it leaves
        return copy.may_demote and not twice and not directory.is_cold(block_hash)

    def _begin_demotion(self, copies: list[Copy]) -> None:
        for copy in copies:
            copy.pins += 1
        self._demoting += len(copies)
        self._make_cold_room()
        job = Demote(
            self.book.number(),
            tuple(copy.id for copy in copies),
            tuple(copy.block_hash for copy in copies),
        )
        self.book.open(job, lambda done: self._demoted(copies, done))

    def _demoted(self, copies: list[Copy], done: JobDone) -> None:
        self._demoting -= len(copies)
        directory = self.directory
        for copy in copies:
            directory.unpin(copy)
        kept = [copy for copy in copies if directory.warm(copy.block_hash) is copy]
        refused = {copies[at].id for at in done.failed}
        written = [copy.block_hash for copy in kept if copy.id not in refused]
        # Cleared meanwhile: what was written no longer counts.
        self.lose_cold([copy.block_hash for copy in copies if copy not in kept], Cause.RESET)
        for block_hash in written:
            directory.add_cold(block_hash)
        self.counts.demoted += len(written)
        self.announce(written, Tier.COLD)
        # A copy that the disk did not take goes all the same: memory is what is short.
        self.give_up(kept, Cause.NOT_TAKEN)
        self.counts.dropped -= len(written)

    def _make_cold_room(self) -> None:
        """Make room on disk for what is on its way: the disk would choose victims itself."""
        excess = self.directory.cold_blocks + self._demoting - self.directory.cold_capacity
        if excess > 0:
            gone = self.directory.oldest_cold(excess)
            self.counts.dropped += len(gone)
            self.lose_cold(gone)

    # For the sidecar ----------------------------------------------------------------------------

    def announce(self, hashes: Sequence[bytes], tier: Tier) -> None:
        """Emit events for copies that were completed."""
        for event in copied_events(hashes, tier, self.block_bytes):
            self._emit(event)

    def announce_dropped(self, hashes: Sequence[bytes], tier: Tier, cause: Cause) -> None:
        """Emit events for copies that are gone, with the reason."""
        if hashes:
            self._emit(CopiesDropped(pack_hashes(hashes), int(tier), int(cause)))

    def all_copies(self) -> list[AnyEvent]:
        """Return every copy, for a sidecar that starts again; safe to call from any thread."""
        directory = self.directory
        return [
            *copied_events(directory.warm_hashes(), Tier.WARM, self.block_bytes),
            *copied_events(directory.cold_hashes(), Tier.COLD, self.block_bytes),
        ]

    def report(self) -> TierReport:
        """Return levels and counters as an event."""
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
    """Return events that say that blocks have copies in a tier."""
    return [
        BlocksSpilled(
            pack_hashes(hashes[start : start + _ANNOUNCED_AT_ONCE]), int(tier), block_bytes
        )
        for start in range(0, len(hashes), _ANNOUNCED_AT_ONCE)
    ]
