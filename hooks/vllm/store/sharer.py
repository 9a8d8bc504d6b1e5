"""``Sharer``: gives the shared store blocks that other engines may want."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from ....graph.logs.reasons import Cause
from ....graph.types import Tier
from ...tiers.directory import Copy
from ...tiers.jobs import JobDone, Share
from ...tiers.ledger import TierLedger

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from ..observe.group import ObservedGroup

_MOST_REMEMBERED: Final = 131_072  # hashes that may go, and that went: some 20 MiB each; chosen
_AT_ONCE: Final = 256  # blocks copied, and shared, at once, or what follows; chosen
_SHARE_OF_MEMORY: Final = 4  # 1/4 of the memory for copies; chosen


class Sharer:
    """Says which copies go to the store, and makes copies for it where there are none.

    Only blocks of requests that ended and permit it go: exact ones, of the model itself. What this
    engine knows to be there is not sent again.

    Args:
        group: The observed KV cache group.
        ledger: Where copies are recorded.
        copy: Begins to copy blocks of the pool.
        in_pool: Whether the pool has a block.
        permits: Whether a request's blocks may leave this engine.
        at_turn_end: Whether blocks are copied when their request ends; else they go when they are
            copied ahead of their eviction.
    """

    def __init__(
        self,
        group: ObservedGroup,
        ledger: TierLedger,
        copy: Callable[[Sequence[bytes]], None],
        in_pool: Callable[[bytes], bool],
        permits: Callable[[Request], bool],
        at_turn_end: bool,
    ) -> None:
        self._in_pool = in_pool
        self._group, self._ledger, self._copy = group, ledger, copy
        self._permits, self._at_turn_end = permits, at_turn_end
        self._running: dict[str, Request] = {}
        self._allowed: OrderedDict[bytes, None] = OrderedDict()
        self._there: OrderedDict[bytes, None] = OrderedDict()
        self._due: deque[bytes] = deque(maxlen=_MOST_REMEMBERED)  # to be copied
        self._ready: deque[bytes] = deque(maxlen=_MOST_REMEMBERED)  # to be shared
        self._under_way = 0
        ledger.directory.told = self._copied

    @property
    def busy(self) -> bool:
        """Whether there is something to do in another step."""
        return bool(self._due or self._ready)

    def request_scheduled(self, request: Request) -> None:
        """Note that a request runs."""
        if self._permits(request):
            self._running[request.request_id] = request

    def request_finished(self, request_id: str, exact: int | None) -> None:
        """Note that a request ended; of its tokens, the first ``exact`` are (None: all)."""
        request = self._running.pop(request_id, None)
        if request is None:
            return
        hashes = self._group.computed(request, exact)
        new = [each for each in hashes if each not in self._there]
        _remember(self._allowed, new)
        if self._at_turn_end:
            holds = self._ledger.directory.warm
            self._ready.extend(each for each in new if holds(each) is not None)
            self._due.extend(each for each in new if holds(each) is None)

    def missing(self, hashes: Sequence[bytes]) -> None:
        """Note that the store has not the first of ``hashes``; of the others nothing is known."""
        for block_hash in hashes[:1]:
            self._there.pop(block_hash, None)
        self._ledger.announce_dropped(hashes[:1], Tier.POOL, Cause.STORE_GONE)

    def known(self) -> list[bytes]:
        """Return what the store has, as far as this engine knows; safe from any thread."""
        return list(self._there)

    def found(self, hashes: Sequence[bytes]) -> None:
        """Note that the store has these."""
        self._ledger.announce([each for each in hashes if each not in self._there], Tier.POOL)

    def step(self) -> None:
        """Begin with what is due."""
        room = min(_AT_ONCE, self._ledger.directory.warm_capacity // _SHARE_OF_MEMORY)
        if not self._ready and self._due and not self._ledger.book.pressing:
            self._copy([self._due.popleft() for _ in range(min(room, len(self._due)))])
        if self._ready and not self._under_way:
            self._share(room)

    def end(self) -> None:
        """Share nothing any more: the weights may be others than those that records name."""
        self._permits = _nobody
        for each in (self._running, self._allowed, self._there, self._due, self._ready):
            each.clear()

    def _copied(self, hashes: Sequence[bytes]) -> None:
        self._ready.extend(
            each for each in hashes if each in self._allowed and each not in self._there
        )

    def _share(self, most: int) -> None:
        copies: dict[bytes, Copy] = {}
        while self._ready and len(copies) < most:
            copy = self._ledger.directory.warm(self._ready.popleft())
            if copy is not None and copy.may_demote and copy.block_hash not in self._there:
                copies[copy.block_hash] = copy
        if not copies:
            return
        for copy in copies.values():
            copy.pins += 1
        ids = tuple(copy.id for copy in copies.values())
        job = Share(self._ledger.book.number(), ids, tuple(copies))
        self._under_way += 1
        self._ledger.book.open(job, lambda done: self._shared(list(copies.values()), done))

    def _shared(self, copies: Sequence[Copy], done: JobDone) -> None:
        self._under_way -= 1
        directory, counts = self._ledger.directory, self._ledger.counts
        for copy in copies:
            directory.unpin(copy)
        taken = [copy.block_hash for at, copy in enumerate(copies) if at not in done.failed]
        if all(map(directory.holds, copies)):  # else it was cleared meanwhile
            _remember(self._there, taken)
            self._ledger.announce(taken, Tier.POOL)
        counts.shared += len(taken)
        counts.share_failed += len(done.failed)
        if self._at_turn_end:  # their blocks are in the pool: these copies are the first to go
            directory.used(list(filter(self._in_pool, taken)))


def _nobody(request: Request) -> bool:
    return False


def _remember(those: OrderedDict[bytes, None], hashes: Sequence[bytes]) -> None:
    """Add ``hashes`` as the youngest, and forget the oldest beyond what is remembered."""
    for block_hash in hashes:
        those[block_hash] = None
        those.move_to_end(block_hash)
    while len(those) > _MOST_REMEMBERED:
        those.popitem(last=False)
