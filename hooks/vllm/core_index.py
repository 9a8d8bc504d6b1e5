"""``CoreIndex``: which block holds which key, kept by the compiled core."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ...graph.types import Keys
from ...graph.wire.advice import BlockIds
from ...graph.wire.events import BlocksCleared, BlocksRemoved, BlocksStored
from ..keys import key_in_pool, unpack
from .index import BlockIndex
from .tap import Changes, PackedHashes, PoolTap

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    from ..._engine import Batch, Core
    from .groups import ObservedGroup

_MOST_BEHIND: Final = 128  # steps, as in ``LateNotes``
_READ: Final = ("request", "blocks", "num_cached_blocks", "num_full_blocks", "kv_cache_group_id")


class CoreIndex(BlockIndex):
    """The index of a pool with one full-attention group; the core sees every change of it. Raises
    TypeError if the core does not support the pool, and ImportError if there is no core.
    """

    def __init__(
        self, pool: BlockPool, group: ObservedGroup, clock: Callable[[], float] = time.monotonic
    ) -> None:
        from ..._engine import Core

        super().__init__(pool, clock)
        # told which keys the engine evicted, when that is worked through
        self.gone: Callable[[Sequence[int]], None] | None = None
        self.core: Core = Core(
            pool, group.index, self._freed_at, _places(pool), BlocksStored, BlocksRemoved,
            BlocksCleared, group.block_size, self.catch_up,
        )  # fmt: skip

    def __len__(self) -> int:
        self.catch_up()
        return self.core.known

    def catch_up(self) -> None:
        self._tell(self.core.work(True))

    def taken(self) -> None:
        """Limit how many steps' unnoted changes may pile up."""
        if self.core.behind > _MOST_BEHIND:
            self._tell(self.core.work(False))

    def cached(self, keys: Sequence[int], block_ids: Iterable[int]) -> None:
        """Note that block ``block_ids[i]`` holds ``keys[i]`` from now on; as many ids as keys."""
        ids = np.fromiter(block_ids, np.int64)
        self.core.note(np.fromiter(keys, np.uint64, len(keys)), ids)
        self.catch_up()

    def freed(self, block_ids: Sequence[int]) -> None:
        """Note that a request frees these blocks now."""
        self.core.freed(block_ids, len(block_ids), self._clock())

    def remember(self, keys: Sequence[int], block_ids: Sequence[int]) -> None:
        held = block_ids[: len(keys)]
        self.core.note(
            np.fromiter(keys, np.uint64, len(keys)), np.fromiter(held, np.int64, len(held))
        )
        self.freed(held)

    def find(self, key: int) -> KVCacheBlock | None:
        """Return the free block that holds ``key``; None if it is evicted, reused or referenced."""
        self._tell(self.core.work(False))
        block = self._pool.blocks[self.core.find(key)]
        if block.ref_cnt or block.next_free_block is None:
            return None
        block_hash = block.block_hash
        return None if block_hash is None or key_in_pool(block_hash) != key else block

    def holders(self, keys: Keys) -> BlockIds:
        """Return the ids of the blocks that hold ``keys`` or held them last; 0 for an unknown key
        and for a repeated one. Slow, but releases the GIL.
        """
        self.catch_up()
        found = np.empty(len(keys), dtype=np.int64)
        self.core.holders(np.ascontiguousarray(keys, dtype=np.uint64), found)
        return found

    def forget(self, hashes: Sequence[bytes], keys: Sequence[int]) -> Sequence[int]:
        """Note that a hash's block was evicted unseen by the core; see ``BlockIndex``."""
        self.catch_up()
        return unpack(self.core.forget_keys(np.fromiter(keys, np.uint64, len(keys))))

    def clear(self) -> None:
        self.core.clear()

    def _tell(self, gone: bytes | None) -> None:
        if gone is not None and self.gone is not None:
            self.gone(unpack(gone))


def _places(pool: Any) -> tuple[int, int, int, int, int]:
    """Places of the parameters that are read of a caching call; TypeError if one is missing."""
    names = list(inspect.signature(pool.cache_full_blocks).parameters)
    if missing := [each for each in _READ if each not in names]:
        raise TypeError(f"cache_full_blocks has no {', '.join(missing)}")
    one, two, three, four, five = map(names.index, _READ)
    return one, two, three, four, five


class CoreTap(PoolTap):
    """Follows a pool as ``PoolTap`` does; ``next`` returns its changes."""

    def __init__(self, pool: BlockPool, group: int, index: CoreIndex) -> None:
        super().__init__(pool, group)
        self.whole = False  # whether a part must see, within the step, all that was cached
        self.sessions: dict[str, str] = {}  # names of running requests': who cached a block
        self._core, self._is_followed = index.core, True

    def next(self, whole: bool = False) -> Batch | None:
        """Return the changes up to a reset, or up to now; None if nothing changed since the last
        call. With ``whole``, list all cached blocks one by one, as for a part that must see each.
        Raises an error met while noting a change.
        """
        if self._unread is not None:
            raise self._unread
        batch = self._core.take(self.sessions, whole or self.whole)
        if batch is None:
            self.was_reset = False
        return batch

    def take(self) -> Sequence[Changes]:
        """Return the changes since the last call, in order; ``next`` does not return them again."""
        changes: list[Changes] = []
        while (batch := self.next(whole=True)) is not None:
            changes.append(changes_of(batch))
        return changes

    def detach(self, but_resets: bool = False) -> None:
        """Restore the pool's own methods; see ``PoolTap``."""
        self._is_followed = False
        super().detach(but_resets)

    def _failed(self, error: Exception) -> None:
        super()._failed(error)
        self._core.wait_for_take()

    def _cache_full_blocks(self) -> Callable[..., Any]:
        return self._core.cache_full_blocks

    def _note_removed(self) -> Callable[[Any], Any]:
        return self._core.removed

    def _take_latest(self, then_reset: bool = False) -> Changes:
        if then_reset and self._is_followed:
            self._core.was_reset()
        else:
            self._core.forget_notes()
        return Changes()

    def _renewed(self) -> None:
        super()._renewed()
        self._before.clear()  # the core has it


def changes_of(batch: Batch) -> Changes:
    """Return the part of a batch that a listener inside the step gets to see."""
    hashes = batch.evicted_hashes
    width = len(hashes) // batch.evicted if hashes else 1
    return Changes(batch.cached(), PackedHashes(hashes, width), batch.then_reset)
