"""``Sharer``: copies blocks that other engines may want to the shared store."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ....graph.logs.reasons import Cause
from ....graph.types import Tier
from ....graph.wire.events import EngineHello, hashing_of
from ...store.sealed import StoreBreaker, mark_hashing, store_key
from ...store.stores import SharedStore
from ...threads import TaskThread
from ...tiers.directory import Copy
from ...tiers.jobs import JobDone, Share
from ...tiers.ledger import TierLedger

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.request import Request

    from ..groups import ObservedGroup
    from .spiller import Spiller

_MOST_REMEMBERED: Final = 131_072  # hashes that may be shared, and shared ones: 20 MiB each; chosen
_AT_ONCE: Final = 256  # blocks copied or shared at once, unless the following is less; chosen
_SHARE_OF_MEMORY: Final = 4  # 1/4 of the memory for copies; chosen


class Sharer:
    """Chooses which copies go to the store, and makes copies for it if there are none.

    Only exact blocks of the base model go there, from ended requests that permit it. Blocks that
    this engine knows to be there are not sent again.
    """

    def __init__(
        self,
        pool: BlockPool,
        group: ObservedGroup,
        ledger: TierLedger,
        spiller: Spiller,
        permits: Callable[[Request], bool],
        at_turn_end: bool,
    ) -> None:
        self._pool, self._group, self._ledger, self._spiller = pool, group, ledger, spiller
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
        return self._room > 0 and bool(self._due or self._ready)

    @property
    def _room(self) -> int:
        """How many blocks may be copied, or shared, at once: any, wherever there is memory."""
        return min(_AT_ONCE, -(-self._ledger.directory.warm_capacity // _SHARE_OF_MEMORY))

    def request_scheduled(self, request: Request) -> None:
        if self._permits(request):
            self._running[request.request_id] = request

    def request_finished(self, request_id: str) -> None:
        request = self._running.pop(request_id, None)
        if request is None:
            return
        hashes = self._group.computed(request, self._ledger.exact.get(request_id))
        new = [each for each in hashes if each not in self._there]
        _remember(self._allowed, new)
        if self._at_turn_end:
            holds = self._ledger.directory.warm
            self._ready.extend(each for each in new if holds(each) is not None)
            self._due.extend(each for each in new if holds(each) is None)

    def missing(self, hashes: Sequence[bytes]) -> None:
        """Note that the store lacks the first of ``hashes``; nothing is known of the others."""
        for block_hash in hashes[:1]:
            self._there.pop(block_hash, None)
        self._ledger.announce_dropped(hashes[:1], Tier.POOL, Cause.STORE_GONE)

    def known(self) -> list[bytes]:
        """Return the blocks that the store has, as far as known; safe from any thread."""
        return list(self._there)

    def found(self, hashes: Sequence[bytes]) -> None:
        self._ledger.announce([each for each in hashes if each not in self._there], Tier.POOL)

    def step(self) -> None:
        room = self._room
        if not self._ready and self._due and not self._ledger.book.pressing:
            due = [self._due.popleft() for _ in range(min(room, len(self._due)))]
            self._spiller.copy(due, self._group.suffix)
        if self._ready and not self._under_way:
            self._share(room)

    def end(self) -> None:
        """Stop sharing: the weights may no longer be those that the records name."""
        self._permits = lambda request: False
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
        directory.unpin_all(copies)
        taken = [copy.block_hash for at, copy in enumerate(copies) if at not in done.failed]
        if all(map(directory.holds, copies)):  # else it was cleared meanwhile
            _remember(self._there, taken)
            self._ledger.announce(taken, Tier.POOL)
        counts.shared += len(taken)
        counts.share_failed += len(done.failed)
        if self._at_turn_end:  # their blocks are in the pool: these copies are the first to go
            directory.used([each for each in taken if self._group.is_in(self._pool, each)])


def _remember(those: OrderedDict[bytes, None], hashes: Sequence[bytes]) -> None:
    """Add ``hashes`` as the youngest, and forget the oldest beyond what is remembered."""
    for block_hash in hashes:
        those[block_hash] = None
        those.move_to_end(block_hash)
    while len(those) > _MOST_REMEMBERED:
        those.popitem(last=False)


logger = logging.getLogger(__name__)

PATIENCE_S: Final = 0.25  # how long a request waits for the store's answer; chosen
_ASKED_AT_ONCE: Final = 64  # blocks that the store is asked for in one call; chosen
_MOST_BLOCKS: Final = 65_536  # most blocks of a prompt looked up; chosen
_OTHERWISE: Final = (
    "kvgraph: another engine of %r on this shared store has %r, this one %r: they find nothing of "
    "each other's there"
)


@dataclass(slots=True, eq=False)
class _Ask:
    """One request's question: how many of ``hashes``, from the first on, are ``found`` (None: no
    answer yet), and whether somebody still waits.
    """

    hashes: Sequence[bytes]
    asked_at: float
    found: int | None = None
    wanted: bool = True


class StoreLookup:
    """Asks the store once per request, on its own thread; the engine's thread never waits.
    ``names`` are the workers' names for their records; until they are known, nothing is asked.
    """

    def __init__(self, store: SharedStore, clock: Callable[[], float]) -> None:
        self.names: list[str] = []
        self._store, self._clock = store, clock
        self._asks: dict[str, _Ask] = {}
        self._pending: deque[_Ask] = deque()  # that the thread has not answered, the oldest first
        self._breaker = StoreBreaker(time.monotonic)
        self._thread = TaskThread("kvgraph-store-look")

    @property
    def answered(self) -> bool:
        """Whether all questions to the store have been answered."""
        return not self._pending

    def mark(self, hello: Callable[[], EngineHello]) -> None:
        """Exchange with other engines, through the store, how blocks are hashed; logs one line if
        they differ. ``hello`` is called on the store's thread.
        """
        if self.names:
            self._thread.put(lambda: self._mark(hello()))

    def asked(self, request_id: str) -> bool:
        return request_id in self._asks

    def ask(self, request_id: str, hashes: Sequence[bytes]) -> None:
        """Ask how many ``hashes`` the store has, from the first; not while it is silent."""
        ask = self._asks[request_id] = _Ask(hashes[:_MOST_BLOCKS], self._clock())
        if not self.names or self._breaker.rests or self._hangs():
            ask.found = 0
            return
        self._pending.append(ask)
        self._thread.put(lambda: self._look(ask))

    def waits(self, request_id: str) -> bool:
        ask = self._asks[request_id]
        if ask.found is None and self._clock() - ask.asked_at > PATIENCE_S:
            ask.wanted = False
        return ask.found is None and ask.wanted

    def take(self, request_id: str) -> tuple[Sequence[bytes], Sequence[bytes]] | None:
        """Return the answer for a request, once: the hashes asked for, and the leading ones that
        the store has. None if it was returned before, or did not come in time.
        """
        ask = self._asks[request_id]
        if not ask.wanted or ask.found is None:
            return None
        ask.wanted = False
        return ask.hashes, ask.hashes[: ask.found]

    def there(self, request_id: str) -> Sequence[bytes]:
        ask = self._asks.get(request_id)
        return ask.hashes[: ask.found or 0] if ask is not None else ()

    def forget(self, request_id: str) -> None:
        """Forget a request that ended. Until then it is looked up only once: after a failed load,
        vLLM looks up again, which would otherwise never end.
        """
        ask = self._asks.pop(request_id, None)
        if ask is not None:
            ask.wanted = False

    def distrust(self) -> None:
        """Ask nothing for a while, because the store did not return blocks that it listed."""
        self._breaker.failed()

    def end(self) -> None:
        """Close the store as soon as it responds; does not wait."""
        self._thread.put(self._store.close)

    def _hangs(self) -> bool:
        oldest = next(iter(self._pending.copy()), None)  # the thread takes from it meanwhile
        return oldest is not None and self._clock() - oldest.asked_at > PATIENCE_S

    # On the thread ------------------------------------------------------------------------------

    def _mark(self, hello: EngineHello) -> None:
        try:
            other = mark_hashing(self._store, hello)
        except OSError:
            self._breaker.failed()
            return
        if other is not None:
            logger.warning(_OTHERWISE, hello.model, other, hashing_of(hello))

    def _look(self, ask: _Ask) -> None:
        began, found = time.monotonic(), 0
        try:
            if ask.wanted and self._breaker.allows():
                found = self._run(ask)
                self._breaker.succeeded(time.monotonic() - began)
        except OSError:
            self._breaker.failed()
        finally:
            ask.found = found
            self._pending.popleft()

    def _run(self, ask: _Ask) -> int:
        """How many blocks are there, from the first on, for every worker."""
        for start in range(0, len(ask.hashes), _ASKED_AT_ONCE):
            hashes = ask.hashes[start : start + _ASKED_AT_ONCE]
            keys = [store_key(name, each) for each in hashes for name in self.names]
            there = self._store.holds(keys)
            if not ask.wanted:
                return 0
            if False in there:
                return start + there.index(False) // len(self.names)
        return len(ask.hashes)
