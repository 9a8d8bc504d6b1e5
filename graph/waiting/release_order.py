"""The order in which held requests start."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final, NamedTuple

_MOST_TENANTS: Final = (
    4096  # remembered; the one that started a request longest ago is forgotten. Chosen
)
_DEAD_ENTRIES: Final = 64  # in the heap, besides one for each that waits; chosen
_MOST_LOOKED_AT: Final = 64  # lanes, and requests of a lane, in ``pop_nearest``; chosen


@dataclass(frozen=True, slots=True)
class Held:
    """One request that waits for room.

    Attributes:
        request_id: The engine's id of it.
        since: When it began to be held, in seconds of the engine's clock.
        blocks: Blocks of its context that the pool does not hold.
        priority: As in vLLM: lower goes first.
        returning: Whether its session has been served here before.
        session: Its session's name, if it has one.
        tenant: Its tenant's name, if that is known.
        waited_s: What it had waited before: for the engine, or held and given up by its client.
        asker: Who would ask again: the same session, or the same prompt.
    """

    request_id: str
    since: float
    blocks: int
    priority: int = 0
    returning: bool = False
    session: str | None = None
    tenant: str | None = None
    waited_s: float = 0.0
    asker: Hashable = None

    @property
    def born(self) -> float:
        """Since when it waits, all told: what the bound on waiting counts from."""
        return self.since - self.waited_s


class Ages(NamedTuple):
    """What waiting counts for where there is no room, in seconds.

    Attributes:
        overdue_s: Who has waited for as long goes first, whatever it lacks.
        grace_s: So long, whoever lacks less goes first; of two that waited much longer, it is who
            waited longer for each block that it lacks.
    """

    overdue_s: float
    grace_s: float


class _Place(NamedTuple):
    """Where one waits in its lane.

    Attributes:
        since: ``HoldingOrder._now`` when it came.
        number: How many came before it.
    """

    since: float
    number: int
    held: Held


_Lane = OrderedDict[str, _Place]
"""Requests of one tenant, priority and kind (returning or new), by id, in order of arrival."""
_Turn = tuple[int, bool, float, int, _Lane]
"""Where a lane stands among all, by its first request; numbers differ, so lanes never compare."""


class HoldingOrder:
    """Held requests, oldest first for the bound on waiting, and in order for the room.

    Order: by priority; within one, sessions served here before come first; then fairly among
    tenants, by blocks of context (start-time fair queueing, Goyal et al., 1996), each tenant's own
    requests in order of arrival. A client with a thousand sessions therefore delays only itself.
    A tenant pays for what starts, and not for what goes away before. Every operation costs
    O(log n) of those that wait, spread over all.

    Where there is no room, what a request still lacks counts too: see ``pop_nearest``.
    """

    def __init__(self) -> None:
        self._held: dict[str, Held] = {}
        self._ages: list[tuple[float, int, str]] = []  # a heap: when each was born, dead ones too
        self._lanes: dict[tuple[str | None, int, bool], _Lane] = {}  # without the empty ones
        self._turns: list[_Turn] = []  # a heap: each lane once, no later than where it stands now
        self._ends: OrderedDict[str | None, float] = OrderedDict()
        """Where each tenant's last started request ends, the latest last."""
        self._now = 0.0  # blocks started so far, as a fair share of one tenant
        self._count = 0

    @property
    def entries(self) -> int:
        """Places of both heaps, dead ones among them: what they cost to keep."""
        return max(len(self._turns), len(self._ages))

    @property
    def tenants(self) -> int:
        """Tenants whose last started request is remembered."""
        return len(self._ends)

    def __len__(self) -> int:
        return len(self._held)

    def add(self, held: Held) -> None:
        """Add ``held``, behind those of its tenant."""
        self._count += 1
        self._held[held.request_id] = held
        heapq.heappush(self._ages, (held.born, self._count, held.request_id))
        lane = self._lanes.setdefault(_lane_of(held), OrderedDict())
        lane[held.request_id] = _Place(self._now, self._count, held)
        if len(lane) == 1:
            heapq.heappush(self._turns, self._turn(lane))
        self._forget()

    def oldest(self) -> Held | None:
        """The request that has waited longest; None if none is held."""
        ages = self._ages
        while ages:
            held = self._held.get(ages[0][-1])
            if held is not None and held.born == ages[0][0]:
                return held
            heapq.heappop(ages)
        return None

    def peek(self) -> Held | None:
        """The next one in order; None if none is held. Brings the heap's top up to date."""
        turns = self._turns
        while turns:
            lane = turns[0][-1]
            if not lane:
                heapq.heappop(turns)
                continue
            turn = self._turn(lane)
            if turn[:-1] == turns[0][:-1]:
                return _first(lane).held
            heapq.heapreplace(turns, turn)
        return None

    def pop_nearest(self, lacks: Callable[[Held], int], ages: Ages, now: float) -> Held | None:
        """Remove and return one that starts although there is no room; None if none is held.

        Of the best priority, and there of the tenant that has had the least: the request that has
        waited longest, if it is overdue; else the one that has waited longest for the blocks that
        it lacks, so that what is nearly resident, or short, goes before what must be computed, and
        that before whatever came much later (highest response ratio next; Brinch Hansen, 1971).

        Args:
            lacks: Blocks of its prompt that would have to be computed if it started now.
        """
        found = self._least_served()
        if found is None:
            return None
        start, tenant, priority = found
        lanes = [self._lanes.get((tenant, priority, kind)) for kind in (False, True)]
        waiting = (held for lane in lanes if lane for held in _looked_at(lane))
        best = max(waiting, key=lambda held: _claim(held, lacks, ages, now))
        self._now = max(self._now, start)
        return self.take(best.request_id)

    def take(self, request_id: str) -> Held | None:
        """Remove and return ``request_id``, which starts: its tenant pays. None if not held."""
        place = self._remove(request_id)
        if place is None:
            return None
        held, start = place.held, self._start(place)
        if self._turns and self._turns[0][3] == place.number:
            self._now = max(self._now, start)
        self._ends[held.tenant] = start + held.blocks
        self._ends.move_to_end(held.tenant)
        if len(self._ends) > _MOST_TENANTS:
            self._ends.popitem(last=False)
        return held

    def drop(self, request_id: str) -> Held | None:
        """Remove and return ``request_id``, which will never start; None if it was not held."""
        place = self._remove(request_id)
        return place.held if place is not None else None

    def _least_served(self) -> tuple[float, str | None, int] | None:
        """Where the tenant whose turn it is starts, its name and its request's priority."""
        firsts = [_first(lane) for lane in islice(self._lanes.values(), _MOST_LOOKED_AT)]
        turns = [(each.held.priority, self._start(each), each.number, each) for each in firsts]
        if not turns:
            return None
        priority, start, _, place = min(turns)
        return start, place.held.tenant, priority

    def _remove(self, request_id: str) -> _Place | None:
        held = self._held.pop(request_id, None)
        if held is None:
            return None
        key = _lane_of(held)
        lane = self._lanes[key]
        place = lane.pop(request_id)
        if not lane:
            del self._lanes[key]  # the heap's entry is dead: who comes next opens another lane
        return place

    def _start(self, place: _Place) -> float:
        return max(place.since, self._ends.get(place.held.tenant, 0.0))

    def _turn(self, lane: _Lane) -> _Turn:
        place = _first(lane)
        held = place.held
        return held.priority, not held.returning, self._start(place), place.number, lane

    def _forget(self) -> None:
        if len(self._turns) > 2 * len(self._lanes) + _DEAD_ENTRIES:
            self._turns = [turn for turn in self._turns if turn[-1]]
            heapq.heapify(self._turns)
        if len(self._ages) > 2 * len(self._held) + _DEAD_ENTRIES:
            numbers = enumerate(self._held.values(), start=self._count - len(self._held) + 1)
            self._ages = [(held.born, number, held.request_id) for number, held in numbers]
            heapq.heapify(self._ages)


def _first(lane: _Lane) -> _Place:
    return next(iter(lane.values()))


def _looked_at(lane: _Lane) -> Iterator[Held]:
    """The first requests of a lane, as many as a step may look at."""
    return (place.held for place in islice(lane.values(), _MOST_LOOKED_AT))


def _claim(held: Held, lacks: Callable[[Held], int], ages: Ages, now: float) -> tuple[bool, float]:
    waited = now - held.born
    if waited >= ages.overdue_s:
        return True, waited
    return False, (waited + ages.grace_s) / max(1, lacks(held))


def _lane_of(held: Held) -> tuple[str | None, int, bool]:
    return held.tenant, held.priority, held.returning
