"""Which block holds which key: from a ranking's keys to the pool's block objects."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence, Set
from itertools import compress, repeat
from operator import attrgetter
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from ...graph.types import Keys
from ...graph.wire.advice import BlockIds
from ..keys import array_in_pool, key_in_pool
from ..link.mailbox import NOBODY

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

Mask = npt.NDArray[np.bool_]

_HASH: Final = "_block_hash"  # behind a property, which would cost a Python call per block
hash_of: Final[Callable[[KVCacheBlock], bytes]] = attrgetter(
    _HASH if hasattr(KVCacheBlock, _HASH) else "block_hash"
)
_id_of: Final[Callable[[KVCacheBlock], int]] = attrgetter("block_id")
_users_of: Final[Callable[[KVCacheBlock], int]] = attrgetter("ref_cnt")


def stands(block: KVCacheBlock, block_hash: bytes) -> bool:
    """Return whether a block is still in the free queue, with the same content."""
    return block.next_free_block is not None and hash_of(block) is block_hash


class FoundBlocks(NamedTuple):
    """Free blocks that hold wanted keys: ids, objects, and hashes with the group's id."""

    places: Sequence[int]  # positions of their keys among the wanted keys
    ids: BlockIds
    blocks: list[KVCacheBlock]
    hashes: list[bytes]

    @classmethod
    def of(cls, keys: Keys, held: list[KVCacheBlock], ids: BlockIds) -> FoundBlocks:
        """Return those blocks of ``held``, with these ``ids``, that are free and hold the key in
        the same position of ``keys``.
        """
        hashes = list(map(hash_of, held))
        found = cls(range(len(held)), ids, held, hashes)
        if not all(hashes) or any(map(_users_of, held)):
            full = np.fromiter(map(_users_of, held), np.int64, len(held)) == 0
            full &= np.fromiter(map(bool, hashes), np.bool_, len(held))
            found, keys = found.only(full), keys[full]
        if not found.blocks:
            return found
        same = array_in_pool(found.hashes) == keys
        return found if same.all() else found.only(same)

    @classmethod
    def told(
        cls,
        blocks: list[KVCacheBlock],
        hashes: list[bytes] | None = None,
        ids: BlockIds | None = None,
    ) -> FoundBlocks:
        """Return ``blocks``, known to be free, as they are; hashes and ids not given are read from
        them.
        """
        return cls(
            range(len(blocks)),
            np.fromiter(map(_id_of, blocks), np.int64, len(blocks)) if ids is None else ids,
            blocks,
            list(map(hash_of, blocks)) if hashes is None else hashes,
        )

    def only(self, marks: Mask) -> FoundBlocks:
        chosen = marks.tolist()
        return FoundBlocks(
            list(compress(self.places, chosen)), self.ids[marks],
            list(compress(self.blocks, chosen)), list(compress(self.hashes, chosen)),
        )  # fmt: skip

    def first(self, count: int) -> FoundBlocks:
        return FoundBlocks(
            self.places[:count], self.ids[:count], self.blocks[:count], self.hashes[:count]
        )


_MOST_BEHIND: Final = 128  # steps, kept in memory with the blocks that they cached; the client's
# thread reports the latest every 0.2 s. Chosen


class LateNotes:
    """Deferred calls that note changes, made by whichever thread comes first. They run one at a
    time and in order, since counts depend on it.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._noting = Lock()

    def add(self, note: Callable[[], None]) -> None:
        """Add a call, which must not read what another deferred call writes. If too many are
        waiting, the oldest one is made now.
        """
        self._waiting.append(note)
        if len(self._waiting) > _MOST_BEHIND:
            self._make_beyond(_MOST_BEHIND, wait=False)

    def make_all(self, wait: bool = True) -> None:
        """Make all waiting calls. If another thread is making some already, wait for it (``wait``)
        or leave the rest to it.
        """
        self._make_beyond(0, wait)

    def _make_beyond(self, most: int, wait: bool) -> None:
        if not self._noting.acquire(blocking=wait):
            return
        try:
            while len(self._waiting) > most:
                self._waiting.popleft()()
        finally:
            self._noting.release()


_FOUND_AT_ONCE: Final = 1024  # keys per slice, while the engine's thread waits; chosen
_MOST_PER_BLOCK: Final = 2  # entries; those of blocks that vLLM skipped are never evicted; chosen


class BlockIndex:
    """Blocks that entered the prefix cache, by key.

    Changes made by steps are noted later, on the client's thread, or when a key is looked up here.
    An entry may be outdated and is checked before use: ``find`` returns a block only if it still
    has the key that it was noted with.
    """

    def __init__(
        self,
        pool: BlockPool,  # the live block pool
        # monotonic seconds, the clock that rankings are dated in
        clock: Callable[[], float] = time.monotonic,
        # whether every block of the observed group that enters the prefix cache is noted here.
        # Otherwise duplicates are looked for at each eviction, in the pool as it is by then: one
        # that came back meanwhile is not told to have been gone
        hears_all: bool = True,
        # whether nothing else is noted here. Otherwise duplicates that were noted are looked for in
        # the pool, likewise
        hears_only: bool = True,
    ) -> None:
        self._pool = pool
        self._hears_all, self._hears_only = hears_all, hears_only
        self._clock = clock
        self._ids: dict[int, int] = {}
        self._further: dict[int, int] = {}  # by key: how many blocks hold it beside the first
        self._freed_at = np.full(len(pool.blocks), -math.inf)  # seconds, by block id
        self._most = _MOST_PER_BLOCK * len(pool.blocks)
        self.late = LateNotes()  # what changed and is not noted here yet

    def __len__(self) -> int:
        self.catch_up()
        return len(self._ids)

    def catch_up(self) -> None:
        self.late.make_all()

    def doubt(self) -> None:
        """Note that some changes were missed: from now on duplicates are looked for in the pool."""
        self._hears_all = False

    def cached(self, keys: Sequence[int], block_ids: Iterable[int]) -> None:
        ids, before = self._ids, len(self._ids)
        known = frozenset() if ids.keys().isdisjoint(keys) else ids.keys() & set(keys)
        ids.update(zip(keys, block_ids, strict=False))
        if len(ids) - before < len(keys):
            self._count_further(keys, known)
        if len(ids) > self._most:
            self._forget_outdated()

    def _count_further(self, keys: Sequence[int], known: Set[int]) -> None:
        further = self._further
        for key, count in Counter(keys).items():
            if more := count - (key not in known):
                further[key] = further.get(key, 0) + more

    def freed(self, block_ids: Sequence[int]) -> None:
        """Note that a request frees these blocks now."""
        self._freed_at[np.fromiter(block_ids, np.int64, len(block_ids))] = self._clock()

    def remember(self, keys: Sequence[int], block_ids: Sequence[int]) -> None:
        self.late.add(lambda: self.cached(keys, block_ids))
        self.freed(block_ids[: len(keys)])

    def find(self, key: int) -> KVCacheBlock | None:
        """Return the free block that holds ``key``; None if it is evicted, reused or referenced."""
        self.late.make_all(wait=False)
        block = self._pool.blocks[self._ids.get(key, NOBODY)]
        if block.ref_cnt or block.next_free_block is None:
            return None
        block_hash = block.block_hash
        return None if block_hash is None or key_in_pool(block_hash) != key else block

    def holders(self, keys: Keys) -> BlockIds:
        """Return the ids of the blocks that hold ``keys`` or held them last; 0 for an unknown key
        and for a repeated one.

        Works in slices, so that the engine's thread can run in between.
        """
        self.catch_up()
        found = np.zeros(len(keys), dtype=np.int64)
        for start in range(0, len(keys), _FOUND_AT_ONCE):
            some = keys[start : start + _FOUND_AT_ONCE].tolist()
            found[start : start + len(some)] = list(map(self._ids.get, some, repeat(NOBODY)))
            time.sleep(0)
        first = np.unique(keys, return_index=True)[1]
        if len(first) < len(keys):
            found[np.setdiff1d(np.arange(len(keys)), first)] = NOBODY
        return found

    def find_unused(
        self, keys: Keys, since: float, at: BlockIds | None = None, but: Mask | None = None
    ) -> FoundBlocks:
        """Return the free blocks that hold ``keys`` and that no request freed after time ``since``;
        checked as in ``find``.
        """
        ids = self.holders(keys) if at is None else at
        unused = (self._freed_at[ids] <= since) & (ids != NOBODY)
        if but is not None:
            unused &= ~but[ids]
        if unused.all():
            return FoundBlocks.of(keys, self._at(ids), ids)
        found = FoundBlocks.of(keys[unused], self._at(ids[unused]), ids[unused])
        places = np.flatnonzero(unused)[found.places].tolist()
        return found._replace(places=places)

    def _at(self, ids: BlockIds) -> list[KVCacheBlock]:
        # Not from an array of objects: Python's collector does not look through one, and blocks
        # lead to their pool, so that an engine of this process would never go.
        return list(map(self._pool.blocks.__getitem__, ids.tolist()))

    def freed_without_a_word(self, hashes: Sequence[bytes]) -> None:
        """Note that a chain is freed now, and look up which blocks hold it."""
        held = map(self._pool.cached_block_hash_to_block.get_one_block, hashes)
        self.freed([block.block_id for block in held if block is not None])

    def freed_at(self, block: KVCacheBlock) -> float:
        """Return when a request last freed ``block``, in seconds; -inf if none ever did."""
        return float(self._freed_at[block.block_id])

    def forget(self, hashes: Sequence[bytes], keys: Sequence[int]) -> Sequence[int]:
        """Note that a block of each hash was evicted; returns the keys that no block holds any
        longer.

        vLLM keeps duplicates of a block that two requests computed at the same time, and reports
        each removal: the key is gone only when no duplicate is left.
        """
        further = self._further
        if self._hears_all and (not further or further.keys().isdisjoint(keys)):
            deque(map(self._ids.pop, keys, repeat(None)), maxlen=0)
            return keys
        both = zip(hashes, keys, strict=True)
        return [key for block_hash, key in both if not self._stays(block_hash, key)]

    def clear(self) -> None:
        self._ids.clear()
        self._further.clear()

    def _stays(self, block_hash: bytes, key: int) -> bool:
        """Take note that one block less holds a key; whether another one does.

        That is counted, where all is heard: by now the pool may have lost the others too, or have
        the key again, and later changes tell of that.
        """
        further = self._further.pop(key, 0)
        if further > 1:
            self._further[key] = further - 1
        survivor = self._holder(block_hash) if further or not self._hears_all else None
        if survivor is not None:
            self._ids[key] = survivor.block_id
            return True
        if further and self._hears_all and self._hears_only:
            return True
        self._ids.pop(key, None)
        self._further.pop(key, None)
        return False

    def _holder(self, block_hash: Any) -> KVCacheBlock | None:
        """A block that holds a hash now. Of duplicates vLLM takes the first, which fails if the
        engine's thread changes them just then; it does not do so twice in a row.
        """
        block_of = self._pool.cached_block_hash_to_block.get_one_block
        try:
            return block_of(block_hash)
        except (RuntimeError, StopIteration):
            return block_of(block_hash)

    def _forget_outdated(self) -> None:
        """Forget keys of blocks that do not hold them; those that are left fit the pool."""
        blocks = self._pool.blocks
        held = ((key, at, blocks[at].block_hash) for key, at in list(self._ids.items()))
        self._ids = {key: at for key, at, has in held if has and key_in_pool(has) == key}
        self._further = {key: more for key, more in self._further.items() if key in self._ids}
