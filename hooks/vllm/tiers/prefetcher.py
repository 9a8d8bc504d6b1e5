"""Loads copies into free blocks before a request asks for them: for waiting requests, and on the
sidecar's suggestion.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import TYPE_CHECKING, Final, NamedTuple

from ....graph.types import Keys
from ....graph.wire.events import BlocksLoaded
from ...keys import key_of, pack_keys
from ...tiers.directory import CopyDirectory
from ...tiers.jobs import Finish, JobDone, Load
from ...tiers.ledger import TierLedger
from .loader import Loader, settle_copies, take_copies

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

    from ....graph.wire.events import AnyEvent
    from ..groups import ObservedGroup
    from ..index import BlockIndex

# ``WaitingLine``: the requests in vLLM's queue, in order, and the blocks that each needs.

_IN_SIGHT: Final = 64  # requests at the head of the queue whose copies may be loaded; chosen

_Key = tuple[float, float, str]  # smaller: nearer to the head


class Waiting(NamedTuple):
    """The next request whose copies may be loaded before its turn, the ``blocks`` that it needs,
    and the blocks that requests ``ahead`` of it need.
    """

    request: Request
    blocks: int
    ahead: int


@dataclass(slots=True, eq=False)
class _Place:
    request: Request
    key: _Key
    blocks: int
    joined: int  # number of the step in which it arrived
    open: bool  # neither looked up by vLLM nor served here


class WaitingLine:
    """The requests that wait for blocks, by priority or arrival. If turns are ``served`` ahead, a
    request's copies may be loaded once one step has passed it over. If nobody is before it, its
    turn comes in that step anyway, and its own load is as early and brings all copies at once.
    """

    def __init__(self, by_priority: bool = False, served: bool = False) -> None:
        self._by_priority, self._in_sight = by_priority, _IN_SIGHT if served else 0
        self._numbers = count()
        self._steps = self.needed = 0
        self._places: dict[str, _Place] = {}
        self._order: list[tuple[_Key, str]] = []  # ascending

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._places

    def __len__(self) -> int:
        return len(self._places)

    def join(self, request: Request, blocks: int) -> None:
        self.leave(request.request_id)
        key = (0.0, float(next(self._numbers)), request.request_id)
        if self._by_priority:
            key = (float(request.priority), request.arrival_time, request.request_id)
        # vLLM computes the whole prompt of one that skips the prefix cache.
        open_ = not getattr(request, "skip_reading_prefix_cache", False)
        place = _Place(request, key, blocks, self._steps, open_)
        self._places[request.request_id] = place
        insort(self._order, (key, request.request_id))
        self.needed += blocks

    def leave(self, request_id: str) -> None:
        if place := self._places.pop(request_id, None):
            del self._order[bisect_left(self._order, (place.key, request_id))]
            self.needed -= place.blocks

    def close(self, request_id: str) -> None:
        """Note that a request's copies need no prefetch: its turn has come, or they were
        prefetched.
        """
        if place := self._places.get(request_id):
            place.open = False

    def passed(self) -> None:
        """Note that a step's allocations are over: requests that still wait were passed over."""
        self._steps += 1

    def next(self) -> Waiting | None:
        """Return the first request near the head whose copies may be loaded; None if there is
        none.
        """
        ahead = 0
        for _, request_id in islice(self._order, self._in_sight):
            place = self._places[request_id]
            if place.open and place.joined < self._steps:
                return Waiting(place.request, place.blocks, ahead)
            ahead += place.blocks
        return None


# ``LackingCopies``: the copies needed by a waiting request that vLLM has not looked up yet.


class LackingCopies:
    """The blocks of one request's prompt that the pool lacks; looked up once, then returned in
    parts. ``is_there``: whether a block is in the pool or on its way there. ``is_faster``: whether
    loading blocks takes no longer than computing them.
    """

    def __init__(
        self,
        group: ObservedGroup,
        directory: CopyDirectory,
        is_there: Callable[[bytes], bool],
        is_faster: Callable[[str, Sequence[bytes]], bool],
    ) -> None:
        self._group, self._directory = group, directory
        self._is_there, self._is_faster = is_there, is_faster
        self._request_id = ""
        self._left: list[bytes] = []

    def take(self, request: Request, most: int) -> tuple[list[bytes], bool]:
        """Return the hashes of the next blocks to load for ``request``, ``most`` at most, and
        whether they are the last ones.
        """
        if request.request_id != self._request_id:
            self._request_id, self._left = request.request_id, self._look_up(request)
        taken, self._left = self._left[:most], self._left[most:]
        # Since the lookup, copies may have gone and blocks may have come.
        found = [each for each in taken if each in self._directory and not self._is_there(each)]
        return found[: self._directory.run(found)], not self._left

    def _look_up(self, request: Request) -> list[bytes]:
        """Blocks with copies that a match would reach; none where computing them is faster."""
        found: list[bytes] = []
        # The last token is always computed: its logits are what the request wants.
        for block_hash in self._group.hashes(request, request.num_tokens - 1):
            if self._is_there(block_hash):
                continue
            if block_hash not in self._directory:
                break
            found.append(block_hash)
        found = found[: self._directory.run(found)]
        return found if found and self._is_faster(request.request_id, found) else []


_MOST_AT_ONCE: Final = 64  # loads of blocks started per step; chosen
_MOST_UNUSED_SHARE: Final = 2  # at most 1/2 of the pool may hold blocks not yet hit; chosen
_MEMORY: Final = 128  # blocks over which the hit rate is measured; chosen
_LEAST_TRUST: Final = 0.25  # floor, so that prefetching can recover; chosen
_LEAST_FREE_SHARE: Final = 8  # at least 1/8 of the pool stays free for requests; chosen
_SCAN: Final = 512  # suggestions, or blocks of prompts, checked per step; chosen


class Prefetcher:
    """Fills free blocks from copies and registers them in the prefix cache, unreferenced."""

    def __init__(
        self,
        pool: BlockPool,
        group: ObservedGroup,
        index: BlockIndex,
        ledger: TierLedger,
        emit: Callable[[AnyEvent], None],
        line: WaitingLine,
        loader: Loader,
    ) -> None:
        self._pool, self._group, self._index = pool, group, index
        self._ledger, self._emit = ledger, emit
        self._line, self._load_victims = line, loader.load_victims
        self._lacking = LackingCopies(group, ledger.directory, self._is_there, loader.is_faster)
        self._order: Keys | None = None
        self._next = self._left = 0  # left: of the order, while the sidecar stands by it
        self.unused: set[int] = set()  # keys that were brought back and not hit yet
        self._under_way = 0  # blocks that loads are filling
        self._cancelled: int | None = None  # the key that there was no room for last
        self._trust = 0.5  # how many of the last blocks that were brought back were hit
        self.held: list[KVCacheBlock] = []  # blocks that a load is filling

    def offered(self, order: Keys | None) -> int:
        """Adopt the sidecar's newest order, if there is one. Returns the most blocks that a step
        would take, for the order and for a waiting request.
        """
        if order is not None and order is not self._order:
            self._order, self._next = order, 0
        self._left = 0 if order is None else len(order) - self._next
        waiting = self._line.next() if self._ledger.directory.has_any else None
        if waiting is None:
            return min(self._left, _MOST_AT_ONCE)
        awaited = min(waiting.blocks, self._room(_MOST_AT_ONCE, waiting.ahead))
        return min(self._left + awaited, _MOST_AT_ONCE)

    def step(self, spare: int) -> None:
        """Start loading what waiting requests lack, then the next suggestions, into ``spare``
        blocks that can be taken without losing anything.
        """
        spare = min(spare, _MOST_AT_ONCE)
        spare -= self._serve_line(spare)
        if self._left:
            assert self._order is not None
            hashes = self._next_hashes(self._order, self._room(spare, self._line.needed))
            if hashes:
                self._begin(hashes)

    def hit(self, hashes: Sequence[bytes]) -> None:
        """Note that a request found these blocks in the prefix cache."""
        if self.unused:
            for block_hash in hashes:
                key = key_of(block_hash)
                if key in self.unused:
                    self.unused.remove(key)
                    self._ledger.counts.prefetch_useful += 1
                    self._trust += (1.0 - self._trust) / _MEMORY

    def evicted(self, keys: Sequence[int]) -> None:
        if self.unused:
            wasted = self.unused.intersection(keys)
            self.unused -= wasted
            self._ledger.counts.prefetch_wasted += len(wasted)
            self._trust *= (1.0 - 1.0 / _MEMORY) ** len(wasted)

    def clear(self) -> None:
        """Forget the blocks that were not hit yet: the prefix cache was reset."""
        self._ledger.counts.prefetch_wasted += len(self.unused)
        self.unused.clear()

    def _serve_line(self, spare: int) -> int:
        """Begin with the copies that requests wait for, in the queue's order; returns how many
        blocks that took.
        """
        begun = looked = 0
        while looked < _SCAN and (waiting := self._line.next()) is not None:
            room = self._room(spare - begun, waiting.ahead)
            if not room:
                break
            hashes, were_all = self._lacking.take(waiting.request, room)
            if hashes:
                self._begin(hashes)
            begun, looked = begun + len(hashes), looked + waiting.blocks
            if were_all:
                self._line.close(waiting.request.request_id)
        return begun

    def _room(self, spare: int, needed: int) -> int:
        pool = self._pool
        free: int = pool.get_num_free_blocks() - needed - pool.num_gpu_blocks // _LEAST_FREE_SHARE
        unused = len(self.unused) + self._under_way
        most = pool.num_gpu_blocks // _MOST_UNUSED_SHARE
        allowed = int(most * max(self._trust, _LEAST_TRUST)) - unused
        return max(0, min(spare, free, allowed))

    def _next_hashes(self, order: Keys, room: int) -> list[bytes]:
        """Return the next suggested blocks that have a copy and are not in the pool."""
        ledger = self._ledger
        found: list[bytes] = []
        keys = order[self._next : self._next + _SCAN].tolist()
        for key, block_hash in zip(keys, ledger.directory.hashes_of(keys), strict=True):
            self._next += 1
            if block_hash is None or self._is_there(block_hash):
                continue
            if len(found) >= room:
                # The chain's next blocks are unreachable without this one: the rest must wait
                # for the sidecar's next suggestion.
                ledger.counts.prefetch_cancelled += key != self._cancelled
                self._cancelled, self._next = key, len(order)
                break
            found.append(block_hash)
        return found[: ledger.directory.run(found)]

    def _is_there(self, block_hash: bytes) -> bool:
        """Whether a block is in the pool, or a load is bringing it there."""
        return block_hash in self._ledger.coming or self._group.is_in(self._pool, block_hash)

    def _begin(self, hashes: list[bytes]) -> None:
        ledger = self._ledger
        self._load_victims.prepare(len(hashes))
        blocks = self._pool.get_new_blocks(len(hashes))
        self.held += blocks
        self._under_way += len(hashes)
        taken = take_copies(ledger, hashes)
        copies, from_disk, _ = taken
        cold = len(from_disk) * ledger.block_bytes
        ledger.expect(hashes, len(hashes) * ledger.block_bytes - cold, cold)
        job = Load(
            ledger.book.number(),
            taken.ids,
            tuple(block.block_id for block in blocks),
            from_disk,
            None,
            from_store=taken.from_store,
        )

        def ended(done: JobDone) -> None:
            ledger.arrived(hashes)
            self._under_way -= len(hashes)
            valid = ledger.directory.holds
            good = [at for at in range(len(hashes)) if at not in done.failed and valid(copies[at])]
            kept_off = (key_of(hashes[at]) for at in good if not copies[at].may_demote)
            ledger.kept_off_disk.update(kept_off)
            self._register([hashes[at] for at in good], [blocks[at] for at in good])
            held = set(map(id, blocks))
            self.held[:] = [block for block in self.held if id(block) not in held]
            # Head first in the list, so that the tail is freed, and evicted, before it.
            self._pool.free_blocks(reversed(blocks))
            settle_copies(ledger, taken, done, hashes)

        over: Finish = ended
        try:
            over = self._load_victims.save(job.targets, ended)
        finally:  # whatever fails: by its load's end, and by nothing else, the blocks come back
            ledger.book.open(job, over)

    def _register(self, hashes: list[bytes], blocks: list[KVCacheBlock]) -> None:
        """Enter filled blocks into the prefix cache, unless a request computed them meanwhile."""
        new: list[tuple[int, KVCacheBlock]] = []
        for block_hash, block in zip(hashes, blocks, strict=True):
            if not self._group.is_in(self._pool, block_hash):
                full_hash = block_hash + self._group.suffix
                self._pool._insert_block_hash(full_hash, block, self._group.block_size)
                new.append((key_of(block_hash), block))
        keys = [key for key, _ in new]
        self._index.remember(keys, [block.block_id for _, block in new])
        self.unused.update(keys)
        self._ledger.counts.prefetched += len(keys)
        if keys:
            self._emit(BlocksLoaded(pack_keys(keys)))
