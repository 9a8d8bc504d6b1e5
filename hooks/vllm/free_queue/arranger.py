"""Applies a ranking to vLLM's free queue, between allocations. vLLM itself still allocates. A
*window* of the ranking's first victims is kept at the head, as large as recent steps' allocations.
It is rebuilt only for a new ranking, and refilled when few victims are left. Outside the window,
``protection.py`` keeps protected blocks away from the head.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Final, Protocol

from ....graph.wire.advice import EvictionRanking
from ....graph.wire.events import AdviceApplied
from ...settings import PROTECT_STALE_S
from ..core_index import CoreIndex
from ..index import BlockIndex
from .core_window import CoreWindow
from .protection import HeadGuard, ProtectedKeys
from .window import Victims, Window

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    from ..tap import Changes


class BlankBlocks:
    """Counts the blank blocks at the queue's head, up to what two steps can take."""

    def __init__(self, pool: BlockPool, blocks_per_step: int) -> None:
        self._pool = pool
        self._blocks_per_step = blocks_per_step
        # While this one is blank, so are more than a step can take; None: nothing is known.
        self.far: KVCacheBlock | None = None

    @property
    def suffice(self) -> bool:
        """Whether, as far as is known, no step needs any other block."""
        return self.far is not None

    def reset(self) -> None:
        self.far = None

    def still_suffice(self) -> bool:
        """Return whether more blank blocks than a step can take are known to be at the head;
        forgets the count once they are gone.

        While they last, this is one attribute check: ``far`` is the block ``blocks_per_step`` deep,
        with as many blank blocks behind it, and blocks leave the queue from its head only.
        """
        blank = self.far
        if blank is None:
            return False
        if blank.ref_cnt == 0 and blank.block_hash is None:
            return True
        self.far = None
        return False

    def count(self) -> int | None:
        """Count the blank blocks at the head; None, remembered, if they suffice for two steps."""
        far: KVCacheBlock | None = None
        queue = self._pool.free_block_queue
        for ahead, block in enumerate(queue.iter_blocks_after(None), start=1):
            if block.block_hash is not None:
                return ahead - 1
            if ahead == self._blocks_per_step:
                far = block
            if ahead == 2 * self._blocks_per_step:
                self.far = far
                return None
        return None  # nothing cached is free: there is nothing to arrange


_STEPS_CARRIED: Final = 2  # a fast copy is complete two steps after its block was moved to the head


class Copier(Protocol):
    """Copies blocks that are about to be evicted."""

    def freed(self) -> None:
        """Note that blocks were freed."""

    def touched(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Note that a hit took ``blocks`` out of the free queue."""

    def gone(self, keys: Sequence[int]) -> None:
        """Note that the engine evicted ``keys``."""

    def laid_more(self, victims: Victims, at_head: bool) -> None:
        """Note that advice moved blocks to the head, or behind the ``victims`` there."""


class FreeQueueArranger:
    """Permutes the free queue so that the ranking's first victims are allocated first.

    The counters run from the engine's start: ``moved``, ``recycled`` (ranked blocks left alone
    because they were evicted, reused, referenced, or used since), ``stale`` (steps without advice),
    ``protected_evicted``.
    """

    def __init__(
        self,
        pool: BlockPool,
        index: BlockIndex,
        blocks_per_step: int,
        protect_stale_s: float = PROTECT_STALE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.epoch = 0
        self._copier: Copier | None = None
        self._pool, self._index, self._blocks_per_step = pool, index, blocks_per_step
        self.stale = 0
        self._protection = ProtectedKeys(len(pool.blocks), protect_stale_s, clock)
        self._core = index.core if isinstance(index, CoreIndex) else None
        self._blanks = BlankBlocks(pool, blocks_per_step)
        self._window = self._new_window(pool, index)
        self._guard = HeadGuard(pool, self._window, self._protection)
        self._latest: EvictionRanking | None = None  # that was acted on in the last step
        self._is_disturbed = True  # by another's word since
        self._guard.relaid = self._window.forget
        self._guard.covered = self._window.forget_all

    def copies_first(self, copier: Copier) -> None:
        """Inform ``copier`` of changes to the queue from now on, and evict some victims of the last
        ranking before those of a new one, which have no copies yet.
        """
        self._copier = copier
        self._disturb()
        self._window.ahead, self._window.laid_more = 1 + _STEPS_CARRIED, copier.laid_more

    @property
    def held_back(self) -> int:
        """Number of protected blocks moved away from the head since the engine's start."""
        return self._guard.moved

    @property
    def moved(self) -> int:
        return self._window.laid + self._guard.moved

    @property
    def recycled(self) -> int:
        return self._window.recycled

    @property
    def protected_evicted(self) -> int:
        return self._protection.evicted_protected

    def expect(self, decoding: int, prompts: int, loads: int = 0) -> bool:
        """Note what the next step can take; returns whether the queue must be arranged first."""
        return self._window.expect(decoding, prompts, loads)

    def stated(self, keys: Sequence[int], is_over: bool) -> None:
        """Note that a caller protects these keys, or that its request ended (``is_over``)."""
        before = self._protection.stated_count
        (self._protection.over if is_over else self._protection.state)(keys)
        if self._protection.stated_count != before:
            self._guard.forget_head()  # others may be forgotten for it, and go before what is kept
            self._disturb()

    def freed(self) -> None:
        if self._is_disturbed:  # as by a caller's word of which no step knows yet
            self._guard.step()
        else:
            self._guard.freed()
        if self._copier is not None:
            self._copier.freed()

    def touched(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Note that a prefix hit took ``blocks`` out of the queue, from any position: the blocks at
        the head may no longer suffice for what the same step takes next.
        """
        copier = self._copier
        if copier is None and not (len(self._window.victims) or self._guard.stands):
            return
        was_free = [block for block in blocks if block.ref_cnt == 1]
        if not was_free:
            return
        ids = [block.block_id for block in was_free]
        fewer = self._window.forget(ids)
        lacks = fewer and not self._window.still_suffices()
        if lacks and self._latest is not None:  # the same step takes what stands at the head now
            lacks = not self._lay_window(self._latest)
            self._watch()
        if self._guard.touched(ids) or lacks:
            self._guard.step()
        if copier is not None:
            copier.touched(was_free)  # last: it looks at what stands at the head now

    def step(
        self,
        # the latest ranking, if it is fresh enough to act on; None otherwise
        ranking: EvictionRanking | None,
        # the latest, fresh or not: what it protects is still protected
        remembered: EvictionRanking | None = None,
        # the sidecar may have missed what was reported before this time
        linked_since: float = -math.inf,
    ) -> None:
        """Bring the queue in line with the advice; call once between two allocations."""
        self._latest, self._is_disturbed = ranking, False
        lapsed = self._protection.look_through(ranking, linked_since)
        if self._protection.adopt(ranking or remembered, linked_since) or lapsed:
            self._guard.forget_head()
        if ranking is None:
            self.stale += 1
            self._blanks.reset()
            self._guard.step()
        elif self._lay_window(ranking):
            self._guard.forget_head(and_who_is_free=True)  # looked at once that is over
        else:
            self._guard.step()
        self._watch()

    def step_ended(self, evicted: int) -> None:
        self._window.step_ended(evicted)

    def rests(self, ranking: EvictionRanking | None) -> bool:
        """Return whether there is nothing to arrange for the next step, as in nearly all steps: the
        ranking is the last step's, and the victims laid for it suffice. Otherwise ``step`` must be
        called.
        """
        if self._is_disturbed or ranking is None or ranking is not self._latest:
            return False
        if self._blanks.suffice:  # a blank one leaves without a word
            return self._window.reach <= self._blocks_per_step and self._blanks.still_suffice()
        if not self._window.holds_enough:
            return False
        # Where a step may take others, protected blocks must not stand among them.
        return not self._protection or self._window.still_suffices()

    def guard_head(self) -> None:
        """Keep protected blocks out of the next step's reach, if any other is free, when there is
        no advice.
        """
        self._latest = None
        self._disturb()
        self._guard.step()

    def spare(self, most: int, fetched: int) -> int:
        """Return how many of the next ``most`` blocks a prefetch may take, so that neither it nor
        the next step needs a protected one. The step was expected to take ``fetched`` for it.
        """
        if not self._protection:
            return most
        step = self._window.reach - fetched
        head = self._pool.free_block_queue.iter_blocks_after(None)
        _, others = self._protection.parted(list(islice(head, most + step)))
        return min(most, len(others) - step)

    def heeds(self, ranking: EvictionRanking) -> bool:
        return self._window.follows(ranking)

    def evicted(self, keys: Sequence[int]) -> None:
        self._protection.evicted(keys)
        if self._copier is not None:
            self._copier.gone(keys)

    def report(self, dropped: int) -> AdviceApplied:
        """Return what was done with the advice; ``dropped`` events were never sent."""
        self._index.catch_up()  # and so does what is counted of evictions
        return AdviceApplied(
            epoch=self.epoch,
            moved=self.moved,
            recycled=self.recycled,
            stale=self.stale,
            protected_evicted=self.protected_evicted,
            dropped=dropped,
        )

    def changed(self, changes: Changes) -> None:
        """Note whether the prefix cache was reset."""
        if changes.then_reset:
            self.clear()

    def clear(self) -> None:
        self._latest = None
        self._disturb()
        self._window.reset()
        self._blanks.reset()
        self._protection.reset()
        self._guard.forget_head(and_who_is_free=True)

    def _disturb(self) -> None:
        """Have the next step look, whatever ``rests`` said of the last one."""
        self._is_disturbed = True
        if self._core is not None:
            self._core.disturb()

    def _watch(self) -> None:
        """Let the compiled core see by itself that there is nothing to arrange; as ``rests``."""
        if self._core is None:
            return
        if self._is_disturbed:
            self._core.disturb()
        else:
            guards, settled = bool(self._protection), self._window.is_settled
            self._core.rest_on(self._latest, self._blanks.far, settled, guards)

    def _new_window(self, pool: BlockPool, index: BlockIndex) -> Window:
        most, protection = self._blocks_per_step, self._protection
        if isinstance(index, CoreIndex):
            return CoreWindow(pool, index, most, protection)
        return Window(pool, index, most, protection.stated_among)

    def _lay_window(self, ranking: EvictionRanking) -> bool:
        """Follow ``ranking`` and lay its window if that is due; returns whether a step can take
        only the window and blanks.
        """
        window = self._window
        if not window.follows(ranking):  # also where blanks suffice: they may not for long
            self.epoch = max(0, ranking.epoch)  # below 0: not of a sidecar's making
            carried = 0 if self._copier is None else _STEPS_CARRIED
            kept, _ = self._protection.parted(window.adopt(ranking, carried).blocks)
            if kept:  # of the last ranking's victims, however far from the head
                self._guard.to_back(kept)
        blanks_may_do = window.reach <= self._blocks_per_step  # loads take more
        if blanks_may_do and self._blanks.still_suffice():
            return True
        if window.falls_due() and (place := self._place_for_more(ranking)) is not None:
            window.lay(place, ranking.known_of, window.reach if self._protection else 0)
            self._guard.forget_head()  # it may rely on some of them
        return (blanks_may_do and self._blanks.suffice) or window.still_suffices()

    def _place_for_more(self, ranking: EvictionRanking) -> KVCacheBlock | None:
        """Behind which block more victims belong; None: there are blank blocks enough."""
        if (last := self._window.find_anchor(ranking.known_of)) is not None:
            return last
        blanks = self._blanks.count()
        return None if blanks is None else self._window.last_blank(blanks)
