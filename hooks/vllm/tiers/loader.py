"""Loads copies for a request that needs them, unless computing its blocks again is faster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, cast

from ....graph.logs.reasons import Cause
from ....graph.types import Tier
from ...tiers.directory import Copy
from ...tiers.jobs import JobDone, Load, SpliceRun
from ...tiers.ledger import TierLedger
from .spiller import LoadVictims

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request

    from ..groups import ObservedGroup


class Splice(NamedTuple):
    """What a load splices at other positions, besides the blocks that it copies: ``runs`` of tokens
    from pinned ``copies`` into ``blocks``, the last of which may be only partly filled.
    """

    runs: tuple[SpliceRun, ...] = ()
    blocks: tuple[int, ...] = ()
    copies: tuple[Copy, ...] = ()


NO_SPLICE: Final = Splice()


class _Match(NamedTuple):
    """Blocks of a request that a load can fill: these hashes, from block ``first`` on, as of when
    so many copies had been ``lost``.
    """

    first: int
    hashes: Sequence[bytes]
    lost: int


class Loader:
    """Answers vLLM's question how many of a prompt's tokens are available outside its pool.
    ``load_victims`` copies the blocks that loads overwrite.
    """

    def __init__(self, group: ObservedGroup, ledger: TierLedger, load_victims: LoadVictims) -> None:
        self._group, self.load_victims = group, load_victims
        self._ledger = ledger
        self._matches: dict[str, _Match] = {}  # looked up, not yet allocated
        self._declined: set[str] = set()
        self._delayed: dict[str, float] = {}  # by others' loads and prefetches: since when
        self._begun = 0  # blocks that loads took since ``take_begun``

    def remembered(self, request_id: str, first: int) -> tuple[int, bool] | None:
        """Return the last answer to a waiting request while it is valid; None if the request must
        be looked up. vLLM asks again in every step while a request waits for room.
        """
        match = self._matches.get(request_id)
        directory = self._ledger.directory
        if match is None or match.first != first or self._ledger.coming:
            return None
        # Of what is on disk or in the store, room decides.
        if match.lost != directory.lost or directory.cold_capacity or directory.in_store:
            return None
        return len(match.hashes) * self._group.block_size, True

    def request_looked_up(
        self, request_id: str, hashes: Sequence[bytes], first: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens a load can bring, and whether the request must wait for them.

        ``(tokens, True)`` if a load can bring that many; ``(0, False)`` if none; ``(None, False)``
        if another load is fetching the first block, and vLLM must ask again. An overdue load is not
        waited for: a disk may hang, and the blocks can always be computed.
        """
        coming = self._ledger.coming
        if hashes and coming.get(hashes[0], 0.0) > (at := self._ledger.clock()):
            self._delayed.setdefault(request_id, at)
            return None, False
        directory = self._ledger.directory
        count = with_room = directory.run(hashes)
        if with_room < len(hashes):
            count = directory.run(hashes, most_reads=directory.warm_capacity)
        if coming and not coming.keys().isdisjoint(hashes):
            count = next((n for n in range(count) if hashes[n] in coming), count)
        if not count or not self.is_faster(request_id, hashes[:count]):
            self._matches.pop(request_id, None)
            return 0, False
        if count > with_room and self.load_victims.fit(count):  # else it cannot begin yet
            self._ledger.make_way(hashes[:count])
            count = directory.run(hashes[:count])
        self._matches[request_id] = _Match(first, hashes[:count], directory.lost)
        return count * self._group.block_size, count > 0

    def foresee(self, tokens: int) -> None:
        """Note that a load of ``tokens`` tokens may be given its blocks next; 0: no load will."""
        self.load_victims.foresee(-(-tokens // self._group.block_size))

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, tokens: int
    ) -> None:
        """Start a load: vLLM accepted ``tokens`` tokens and gave the request its blocks."""
        match = self._matches.pop(request.request_id, None)
        self._declined.discard(request.request_id)
        if (since := self._delayed.pop(request.request_id, None)) is not None:
            counts, now = self._ledger.counts, self._ledger.clock()
            counts.stall_s += now - since
            counts.stalls += not tokens  # else its own load counts
        if not tokens:
            return
        assert match is not None, "a load that nobody offered"
        count = tokens // self._group.block_size
        ids = blocks.get_block_ids()[self._group.index][match.first : match.first + count]
        self.begin(request.request_id, match.hashes[:count], ids)

    def request_finished(self, request_id: str) -> None:
        self._matches.pop(request_id, None)
        self._declined.discard(request_id)
        self._delayed.pop(request_id, None)

    def take_begun(self) -> int:
        """Return how many blocks loads took from the pool since the last call."""
        begun, self._begun = self._begun, 0
        return begun

    def is_faster(self, request_id: str, hashes: Sequence[bytes]) -> bool:
        """Return whether loading ``hashes`` takes no longer than computing them. If it takes
        longer, the answer stays the same for this request until it is scheduled.
        """
        if request_id in self._declined:
            return False  # asked again at each step that the request waits: decide once
        ledger = self._ledger
        size = ledger.block_bytes
        directory, warm, cold, shared = ledger.directory, len(hashes), 0, 0
        if directory.cold_capacity or directory.in_store:  # else all that is found is in memory
            found = directory.all_warm(hashes)
            others = [each for each, copy in zip(hashes, found, strict=True) if copy is None]
            cold = sum(map(directory.is_cold, others))
            warm, shared = warm - len(others), len(others) - cold
        tokens = len(hashes) * self._group.block_size
        if ledger.costs.worth_loading(tokens, warm * size, cold * size, shared * size):
            return True
        self._declined.add(request_id)
        ledger.counts.recomputed += len(hashes)
        return False

    def begin(
        self,
        request_id: str,
        hashes: Sequence[bytes],
        blocks: Sequence[int],
        splice: Splice = NO_SPLICE,
    ) -> None:
        """Start a load: copies of ``hashes`` go to ``blocks``, and ``splice`` after them."""
        ledger = self._ledger
        taken = take_copies(ledger, hashes)
        copies, from_disk, from_store = taken.copies, taken.from_disk, taken.from_store
        job = Load(
            ledger.book.number(), taken.ids, tuple(blocks), from_disk, request_id,
            splice.runs, splice.blocks, from_store,
            ledger.costs.store_limit_s(len(from_store) * self._group.block_size),
        )  # fmt: skip
        began, size = ledger.clock(), (len(copies) + len(splice.copies)) * ledger.block_bytes
        cold, shared = len(from_disk) * ledger.block_bytes, len(from_store) * ledger.block_bytes
        ledger.expect(hashes, size - cold - shared, cold, shared)
        ledger.counts.stalls += 1
        ledger.costs.queued_bytes += size
        self._begun += len(job.targets)

        def ended(done: JobDone) -> None:
            waited = ledger.clock() - began
            ledger.costs.queued_bytes -= size
            if splice.runs:
                ledger.costs.spliced(size, done.seconds, waited)
            else:
                ledger.costs.loaded(done.bytes, done.seconds, bool(from_disk), bool(from_store))
            ledger.counts.stall_s += waited
            ledger.counts.loaded += len(job.targets) - len(done.failed)
            ledger.arrived(hashes)
            ledger.directory.unpin_all(splice.copies)
            settle_copies(ledger, taken, done, hashes)

        ledger.book.open(job, self.load_victims.save(job.targets, ended))


class PinnedCopies(NamedTuple):
    """The pinned copies that a load reads; for new ones, their hashes by position."""

    copies: list[Copy]
    from_disk: dict[int, bytes]
    from_store: dict[int, bytes]

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple([copy.id for copy in self.copies])


def take_copies(ledger: TierLedger, hashes: Sequence[bytes]) -> PinnedCopies:
    """Pin a load's copies; those on disk or in the store get new, empty ones in memory."""
    directory = ledger.directory
    from_disk, from_store, copies = dict[int, bytes](), dict[int, bytes](), list[Copy]()
    found = directory.pinned(hashes)
    if None not in found:
        return PinnedCopies(cast(list[Copy], found), from_disk, from_store)
    for at, copy in enumerate(found):
        if copy is None:
            block_hash = hashes[at]
            copy = directory.begin(block_hash)
            (from_disk if directory.is_cold(block_hash) else from_store)[at] = block_hash
        copies.append(copy)
    # Now, and not when the load ends: what it overwrites may need room on disk, and a step's
    # records are erased before any is read.
    directory.reads(hashes)
    return PinnedCopies(copies, from_disk, from_store)


def settle_copies(
    ledger: TierLedger, taken: PinnedCopies, done: JobDone, hashes: Sequence[bytes]
) -> None:
    """Unpin a load's copies, of ``hashes``; drop those that could not be read."""
    # Copies in memory only now: while they are pinned, whoever needs room would look at them first.
    ledger.directory.used(hashes)
    if not (done.failed or taken.from_disk or taken.from_store):
        ledger.directory.unpin_all(taken.copies)
        return
    ledger.counts.load_failed += len(done.failed)
    lost = done.failed.intersection(taken.from_store)
    ledger.counts.store_failed += len(lost)
    broken_there = [taken.from_store[at] for at in sorted(lost)]
    ledger.announce_dropped(broken_there, Tier.POOL, Cause.STORE_BROKE)
    ledger.counts.store_loaded += len(taken.from_store) - len(lost)
    ledger.directory.in_store.difference_update(taken.from_store.values())
    new = taken.from_disk.keys() | taken.from_store.keys()
    copies = taken.copies
    were_warm = [copy for at, copy in enumerate(copies) if at not in new] if new else copies
    ledger.directory.unpin_all(were_warm)
    broken = [copies[at] for at in sorted(done.failed) if at < len(copies) and at not in new]
    read: list[bytes] = []
    for at in sorted(new):
        if at in done.failed:
            ledger.directory.abandon(copies[at])
        elif ledger.directory.complete_all([copies[at]]):
            read.append(copies[at].block_hash)
    ledger.give_up(broken, Cause.DAMAGED)
    refused = [key for at, key in taken.from_disk.items() if at in done.failed]
    ledger.lose_cold(refused, Cause.DAMAGED)
    ledger.announce(read, Tier.WARM)
