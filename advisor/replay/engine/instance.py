"""One simulated engine: its block pool, its waiting queue, and the tier below."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ....graph.ranking.copy_order import CopyOrder
from ..orders.orders import EvictionOrder


@dataclass(frozen=True, slots=True)
class Admission:
    """What a request found when it was scheduled, in blocks."""

    hit: int  # matched by prefix in the engine's pool
    warmed: int  # matched behind that in the tier below, and loaded
    new: int  # allocated


class HostTier:
    """Host memory below one or more instances, for copies of evicted blocks.

    Args:
        capacity: Blocks that it holds.
        plain: Give up the least recently used copy first; otherwise as a live engine's tiers do.
        selective: Take only blocks that the evicting order considers worth a copy, as live.
    """

    def __init__(self, capacity: int, *, plain: bool = True, selective: bool = False) -> None:
        self.selective = selective
        self._capacity = capacity
        self._held: CopyOrder[int] = CopyOrder(plain)

    def __contains__(self, block: int) -> bool:
        return block in self._held

    def store(self, blocks: Sequence[int]) -> tuple[list[int], list[int]]:
        """Keep copies of evicted blocks, the first of them the first to go.

        Returns:
            Copies that were made, and then copies that are gone, perhaps of the same blocks.
        """
        made, gone = [], []
        for block in blocks:
            if block in self._held:
                self._held.leaves(block)
                continue
            self._held.add(block)
            made.append(block)
            if len(self._held) > self._capacity:
                gone.append(next(self._held.first()))
                self._held.discard(gone[-1])
        return made, gone

    def touch(self, blocks: Sequence[int]) -> None:
        """Note that these copies were read; tail first, so that a chain loses its tail first here
        too."""
        self._held.used(blocks)


class Instance:
    """vLLM's block pool: reference counts, prefix matching, blank blocks first.

    A cached block behind a gap in its chain is not matched; it is computed again in its own place
    (vLLM would hold it twice for a while).

    Args:
        capacity: Blocks of the pool.
        order: Decides which free cached block goes.
        host: The tier below, if there is one.
    """

    def __init__(
        self, capacity: int, order: EvictionOrder, *, host: HostTier | None = None
    ) -> None:
        self.capacity = capacity
        self.blank = capacity
        self.running = 0
        self._order = order
        order.serves(capacity)
        self._host = host
        self._references: dict[int, int] = {}  # cached block → requests that use it
        self._free = 0  # cached blocks that no request uses
        self._unhashed: dict[int, int] = {}  # running request → blocks without a hash

    @property
    def cached(self) -> int:
        """Number of blocks with content that a prompt could match."""
        return len(self._references)

    @property
    def used(self) -> int:
        """Number of blocks that running requests hold."""
        return self.capacity - self.blank - self._free

    def match(self, chain: Sequence[int], limit: int) -> int:
        """How many of the first ``limit`` blocks of a chain are cached, from its start."""
        count = 0
        for block in chain[:limit]:
            if block not in self._references:
                break
            count += 1
        return count

    def reach(self, chain: Sequence[int], limit: int) -> int:
        """How many of the first ``limit`` blocks are cached, here or in the tier below."""
        count = self.match(chain, limit)
        if self._host is not None:
            while count < limit and (
                chain[count] in self._host or chain[count] in self._references
            ):
                count += 1
        return count

    def admit(
        self, request: int, chain: Sequence[int], limit: int, unhashed: int, now: float
    ) -> Admission | None:
        """Schedule a request; None if it must wait for blocks.

        Args:
            chain: Its blocks; all get a place now, and can be matched by the next request.
            limit: How many of them a match may cover.
            unhashed: Blocks for tokens without a hash; returned blank when the request ends.
        """
        hit = self.match(chain, limit)
        references = self._references
        known = [b for b in chain if b in references]
        idle = [b for b in known if not references[b]]
        new = [b for b in chain if b not in references]
        need = len(new) + unhashed
        if need > self.blank + self._free - len(idle):
            return None
        warmed = self._warm(chain, hit, limit)
        self._take(idle, known)
        self._order.reused(idle)
        evicted = self._make_room(need, now)
        references.update(dict.fromkeys(new, 1))
        self._unhashed[request] = unhashed
        self.running += 1
        self._order.started(request, hit, new, now)
        if evicted:
            self._order.evicted(evicted, now)
            if self._host is not None:
                worthy = self._order.worth_copying(evicted) if self._host.selective else evicted
                self._order.copied(*self._host.store(worthy), now)
        return Admission(hit, warmed, len(new))

    def finish(self, request: int, chain: Sequence[int], now: float) -> None:
        """End a request: its blocks come back, the last of the chain first."""
        self._order.finished(request, now)
        self.blank += self._unhashed.pop(request)
        self.running -= 1
        freed = []
        for block in reversed(chain):
            self._references[block] -= 1
            if not self._references[block]:
                freed.append(block)
        self._free += len(freed)
        self._order.freed(request, freed, now)

    def _take(self, idle: Sequence[int], known: Sequence[int]) -> None:
        for block in known:
            self._references[block] += 1
        self._free -= len(idle)

    def _make_room(self, need: int, now: float) -> list[int]:
        """Use blank blocks first, then evict."""
        blank = min(need, self.blank)
        self.blank -= blank
        evicted = self._order.victims(need - blank, now) if need > blank else []
        for block in evicted:
            del self._references[block]
        self._free -= len(evicted)
        return evicted

    def _warm(self, chain: Sequence[int], hit: int, limit: int) -> int:
        if self._host is None:
            return 0
        end = self.reach(chain, limit)
        self._host.touch([b for b in chain[hit:end] if b in self._host])
        return end - hit
