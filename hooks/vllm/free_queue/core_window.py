"""``CoreWindow``: a ranking's next victims, found and moved by the compiled core."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ....graph.wire.advice import EvictionRanking
from ..core_index import CoreIndex
from ..index import FoundBlocks
from .window import AT_ONCE, FADE, LEAST_AHEAD, REACH_STEP, SCAN_PER_VICTIM, Victims, Window

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    from ...._engine import Core
    from .protection import ProtectedKeys


class CoreVictims(Victims):
    """The victims that a compiled core tracks; see ``Victims``."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def __len__(self) -> int:
        return self._core.victims

    @property
    def blocks(self) -> list[KVCacheBlock]:  # type: ignore[override]
        """The blocks in their order, as a new list."""
        looked, self._core.looked = self._core.looked, 0
        blocks, _, _ = self._core.look(self._core.victims)
        self._core.looked = looked
        return blocks

    @property
    def looked(self) -> int:
        return self._core.looked

    @looked.setter
    def looked(self, looked: int) -> None:
        self._core.looked = looked

    @property
    def last(self) -> KVCacheBlock | None:
        return self._core.last

    def add(self, found: FoundBlocks) -> None:
        """Track blocks that code outside the core moved behind the last victim."""
        self._core.add(found.ids.tolist(), found.hashes)

    def drop_taken(self) -> None:
        self._core.drop_taken()

    def keep_first(self, most: int) -> None:
        self._core.keep_first(most)

    def forget(self, ids: Sequence[int]) -> int:
        return self._core.forget(ids)

    def look(self, most: int) -> FoundBlocks:
        blocks, hashes, ids = self._core.look(most)
        return FoundBlocks(range(len(blocks)), np.frombuffer(ids, np.int64), blocks, hashes)


class CoreWindow(Window):
    def __init__(
        self,
        pool: BlockPool,  # the live block pool
        index: CoreIndex,  # whose core finds and moves blocks
        blocks_per_step: int,  # the most blocks that one engine step can allocate
        protection: ProtectedKeys,  # knows what callers state, which no ranking overrules
    ) -> None:
        self._core, self._protection = index.core, protection
        super().__init__(pool, index, blocks_per_step, protection.stated_among)
        self._victims = CoreVictims(index.core)
        self._stated_then = protection.stated_count

    @property
    def reach(self) -> int:  # type: ignore[override]
        return self._core.reach

    @property
    def prompts(self) -> int:  # type: ignore[override]
        return self._core.reach_of_prompts

    @property
    def _largest_step(self) -> float:  # type: ignore[override]
        return self._core.largest_step

    @property
    def ahead(self) -> int:
        return self._ahead

    @ahead.setter
    def ahead(self, steps: int) -> None:
        self._ahead = steps
        self._core.look_ahead(steps, self._most, LEAST_AHEAD)

    def expect(self, decoding: int, prompts: int, loads: int) -> bool:
        return self._core.expect(decoding, prompts, loads)

    def step_ended(self, evicted: int) -> None:
        self._core.step_ended(evicted)

    def adopt(self, ranking: EvictionRanking, carried: int = 0) -> Victims:
        self._followed = self._order = ranking.order
        found = ranking.order_blocks
        if found is None:
            found = self._index.holders(ranking.order)
        order = np.ascontiguousarray(ranking.order, dtype=np.uint64)
        self._core.follow(order, np.ascontiguousarray(found, dtype=np.int64))
        self._due = True
        self._core.drop_taken()
        self._core.keep_first(carried * max(self.prompts, int(self._largest_step)))
        return self._victims

    def reset(self) -> None:
        super().reset()
        self._core.follow(None, None)

    def still_suffices(self) -> bool:
        return self._core.drop_taken() >= self.reach

    def forget(self, ids: Sequence[int]) -> bool:
        """Note that blocks were used again or moved; returns whether any of them was a victim."""
        return self._core.forget(ids) > 0

    @property
    def is_exhausted(self) -> bool:
        return self._core.place >= len(self._order)

    def falls_due(self) -> bool:
        if self.is_exhausted:
            return False
        left = self._core.drop_taken()
        self._due = self._due or self._is_low(left)
        return self._due

    def find_anchor(self, known_of: float) -> KVCacheBlock | None:
        """As ``Window.find_anchor``."""
        return self._core.anchor(known_of)

    def lay(self, place: KVCacheBlock, known_of: float, least: int) -> None:
        core = self._core
        if self._stated_then != self._protection.stated_count:
            self._stated_then = self._protection.stated_count
            core.keep(self._protection.stated_keys())
        left = core.victims
        count = self._to_lay(left, least)
        looked = core.lay(place, count, SCAN_PER_VICTIM * max(0, count), known_of)
        laid = core.victims - left
        if laid:
            self.laid_more(self._victims, not left)
        self.laid += laid
        self.recycled += looked - laid
        self._due = core.victims + AT_ONCE <= self.size and core.place < len(self._order)

    def _size_steps(self) -> None:
        most = self._blocks_per_step
        self._core.sized(most, most, REACH_STEP, float(most), FADE)
