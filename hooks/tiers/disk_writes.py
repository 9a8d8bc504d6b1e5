"""``DiskWrites``: copies on their way to the disk, to leave memory or to stand there too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from ...graph.logs.reasons import Cause
from ...graph.types import Tier
from .directory import Copy
from .jobs import Demote, JobDone

if TYPE_CHECKING:
    from .ledger import TierLedger

_AT_ONCE: Final = 64  # copies; chosen


class DiskWrites:
    """Begins writes to the workers' disks, and takes note of their ends.

    Args:
        ledger: Where copies are recorded.
    """

    def __init__(self, ledger: TierLedger) -> None:
        self._ledger = ledger
        self._under_way: set[int] = set()  # copies, by their ids

    @property
    def idle(self) -> bool:
        """Whether no write is under way."""
        return not self._under_way

    @property
    def room(self) -> int:
        """How many writes can be begun now."""
        return min(_AT_ONCE, self._ledger.directory.cold_capacity) - len(self._under_way)

    def demote(self, count: int, first: Iterable[bytes]) -> None:
        """Demote up to ``count`` copies; drop those that need not or may not be on disk."""
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
        """Write copies that stay in memory, as many as there is room for."""
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
        for copy in copies:
            directory.unpin(copy)
        kept = [copy for copy in copies if directory.warm(copy.block_hash) is copy]
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
        """Make room on disk for what is on its way: the disk would choose victims itself."""
        ledger, directory = self._ledger, self._ledger.directory
        excess = directory.cold_blocks + len(self._under_way) - directory.cold_capacity
        if excess > 0:
            gone = directory.oldest_cold(excess)
            ledger.counts.dropped += len(gone)
            ledger.lose_cold(gone)
