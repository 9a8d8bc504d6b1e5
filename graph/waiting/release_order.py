"""The order in which held requests start."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

_MOST_TENANTS: Final = 4096  # remembered beyond those that wait; chosen
_DEAD_ENTRIES: Final = 64  # in the heap, beside one for each that waits; chosen


@dataclass(frozen=True, slots=True)
class Held:
    """One request that waits for room.

    Attributes:
        request_id: The engine's id of it.
        since: When it began to wait, in seconds of the engine's clock.
        blocks: Blocks of its context that the pool does not hold.
        priority: As in vLLM: lower goes first.
        returning: Whether its session has been served here before.
        session: Its session's name, if it has one.
        tenant: Its tenant's name, if that is known.
    """

    request_id: str
    since: float
    blocks: int
    priority: int = 0
    returning: bool = False
    session: str | None = None
    tenant: str | None = None


class HoldingOrder:
    """Held requests, oldest first for the bound on waiting, and in order for the room.

    Order: by priority; within one, sessions served here before come first; then fairly among
    tenants, by blocks of context (start-time fair queueing, Goyal et al., 1996), each tenant's own
    requests in order of arrival. A client with a thousand sessions therefore delays only itself.
    Every operation costs O(log n) of those that wait.
    """

    def __init__(self) -> None:
        self._held: OrderedDict[str, Held] = OrderedDict()
        self._turns: list[tuple[int, bool, float, int, Held]] = []
        self._ends: dict[str | None, float] = {}  # where each tenant's last request ends
        self._now = 0.0  # blocks started so far, as a fair share of one tenant
        self._count = 0

    def __len__(self) -> int:
        return len(self._held)

    def add(self, held: Held) -> None:
        """Add ``held``, behind those of its tenant."""
        start = max(self._now, self._ends.get(held.tenant, 0.0))
        self._ends[held.tenant] = start + held.blocks
        self._held[held.request_id] = held
        self._count += 1
        heapq.heappush(self._turns, (held.priority, not held.returning, start, self._count, held))
        self._forget()

    def oldest(self) -> Held | None:
        """The request that has waited longest; None if none is held."""
        return next(iter(self._held.values()), None)

    def peek(self) -> Held | None:
        """The next one in order; None if none is held. Drops dead entries of the heap."""
        turns = self._turns
        while turns and not self._waits(turns[0][-1]):
            heapq.heappop(turns)
        return turns[0][-1] if turns else None

    def take(self, request_id: str) -> Held | None:
        """Remove and return ``request_id``; None if it was not held."""
        held = self._held.pop(request_id, None)
        if held is not None and self._turns and self._turns[0][-1] is held:
            self._now = max(self._now, heapq.heappop(self._turns)[2])
        return held

    def _waits(self, held: Held) -> bool:
        return self._held.get(held.request_id) is held

    def _forget(self) -> None:
        if len(self._turns) > 2 * len(self._held) + _DEAD_ENTRIES:
            self._turns = [turn for turn in self._turns if self._waits(turn[-1])]
            heapq.heapify(self._turns)
        if len(self._ends) > len(self._held) + _MOST_TENANTS:
            self._ends = {each: end for each, end in self._ends.items() if end > self._now}
