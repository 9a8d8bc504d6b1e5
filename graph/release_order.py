"""The order in which held requests are released."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, NamedTuple, TypeGuard

_MOST_TENANTS: Final = 4096
"""Most tenants remembered that were served once, and as many that were served again; the tenant
whose last request started longest ago is forgotten first. Chosen.
"""
_UNKNOWN: Final = "\0strangers"  # no tenant has this name
"""Tenants that were never served count as this one, since a caller may take a new name, or cache
salt, for each request."""
_DEAD_ENTRIES: Final = 64  # stale heap entries allowed besides one per waiting tenant; chosen
_MOST_EXAMINED: Final = 64  # lanes of a priority, requests of a lane, in ``pop_patient``; chosen


@dataclass(frozen=True, slots=True)
class Held:
    """A request that waits for room."""

    request_id: str  # the engine's request id
    since: float  # when it began to wait, in seconds of the engine's clock
    blocks: int  # blocks of its context that are not in the pool
    priority: int = 0  # as in vLLM: a lower value goes first
    returning: bool = False  # whether its session has been served here before
    session: str | None = None  # its session's name, if known
    tenant: str | None = None  # its tenant's name, if known


class _Place(NamedTuple):
    """A request's place in its lane."""

    since: float  # value of ``HoldingOrder._now`` when it arrived
    number: int  # number of requests that arrived before it
    held: Held
    # The tenant charged for it: its own, or the stand-in for all unknown tenants.
    payer: str | None


_Lane = OrderedDict[str, _Place]
"""Requests of one tenant, priority and kind (returning or new), by id, in order of arrival."""
_Turn = tuple[int, float, bool, int, int, _Lane]
"""A lane's position in the order, by its first request, and the lane's ``id``, so that lanes
themselves are never compared, even after a request moved to another lane.
"""


class HoldingOrder:
    """Held requests, by age for the limit on waiting, and in fair order for free room.

    The fair order: by priority; within one, fairly among tenants, by blocks of context (start-time
    fair queueing, Goyal et al., 1996); of a tenant's own requests, those of sessions served here
    before come first, each kind in order of arrival. A client with a thousand sessions therefore
    delays only itself, whether they are new or return. A tenant is charged for requests that start,
    not for those that are cancelled. Tenants never served before count as one, so a client that
    uses a new name for each request gets the share of one tenant. Each operation costs amortised
    O(log n) of the held requests. Without room, a request's size counts too: see ``pop_patient``.
    """

    def __init__(self) -> None:
        self._held: OrderedDict[str, Held] = OrderedDict()
        self._lanes: dict[int, OrderedDict[tuple[str | None, bool], _Lane]] = {}
        """By priority; without empty ones."""
        self._turns: list[_Turn] = []  # a heap: each lane once, no later than where it stands now
        self._ends: OrderedDict[str | None, float] = OrderedDict()
        """Where each tenant's last started request ends, the latest last."""
        self._once: OrderedDict[str, float] = OrderedDict()
        """The same of tenants that were served once: names that are never used again push out no
        others."""
        self._unknown: dict[
            str, dict[str, _Place]
        ] = {}  # held requests of unknown tenants, by name and id
        self._now = 0.0  # blocks started so far, as a fair share of one tenant
        self._count = 0

    @property
    def entries(self) -> int:
        """Entries of the heap, including stale ones: a measure of its cost."""
        return len(self._turns)

    @property
    def tenants(self) -> int:
        """Number of tenants whose last started request is remembered."""
        return len(self._ends) + len(self._once)

    def __len__(self) -> int:
        return len(self._held)

    def add(self, held: Held) -> None:
        """Add ``held`` after its tenant's other requests."""
        self._count += 1
        self._held[held.request_id] = held
        tenant = held.tenant
        if self._is_unknown(tenant):
            place = _Place(self._now, self._count, held, _UNKNOWN)
            self._unknown.setdefault(tenant, {})[held.request_id] = place
        else:
            place = _Place(self._now, self._count, held, tenant)
        self._queue(place)

    def served(self, tenant: str | None) -> None:
        if tenant is not None:
            self._end(tenant, self._ended(tenant))

    def oldest(self) -> Held | None:
        return next(iter(self._held.values()), None)

    def peek(self) -> Held | None:
        """Return the next request in order; None if none is held. Updates the top of the heap."""
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

    def pop_patient(self, latest: float, due: float, now: float) -> Held | None:
        """Remove and return a request held since ``latest`` or longer; None without one.

        First by priority, then the tenant served least; of that tenant's requests the longest held,
        if since ``due`` or longer; otherwise the one with the highest ratio of waiting time to
        blocks, so that a short request goes before a long one that arrived with it, and a long one
        before short ones that arrived much later (highest response ratio next; Brinch Hansen,
        1971).
        """
        found = self._least_served(latest)
        if found is None:
            return None
        start, payer, priority = found
        lanes = [self._lanes[priority].get((payer, kind)) for kind in (False, True)]
        firsts = (islice(lane.values(), _MOST_EXAMINED) for lane in lanes if lane)
        patient = (at.held for first in firsts for at in first if at.held.since <= latest)
        best = max(patient, key=lambda held: _claim(held, due, now))
        self._now = max(self._now, start)
        return self.take(best.request_id)

    def take(self, request_id: str) -> Held | None:
        """Remove and return a request that starts, charging its tenant; None if it is not held."""
        place = self._remove(request_id)
        if place is None:
            return None
        held, start = place.held, self._start(place)
        if self._turns and self._turns[0][3] == place.number:
            self._now = max(self._now, start)
        if place.payer == _UNKNOWN:
            self._ends[_UNKNOWN] = start + held.blocks
            self._ends.move_to_end(_UNKNOWN)  # never forgotten before a longer silent tenant
        self._end(held.tenant, start + held.blocks)
        lanes, key = self._lanes.get(held.priority), (place.payer, held.returning)
        if lanes is not None and key in lanes:
            lanes.move_to_end(key)  # ``_least_served`` looks at the first ones
        return held

    def drop(self, request_id: str) -> Held | None:
        """Remove and return a request that will never start; None if it is not held."""
        place = self._remove(request_id)
        return place.held if place is not None else None

    def _least_served(self, latest: float) -> tuple[float, str | None, int] | None:
        """Start, payer and priority of the next tenant, among requests held since ``latest``."""
        for priority in sorted(self._lanes):
            firsts = map(_first, islice(self._lanes[priority].values(), _MOST_EXAMINED))
            patient = [place for place in firsts if place.held.since <= latest]
            if patient:
                turns = ((self._start(each), each.number, each.payer) for each in patient)
                start, _, payer = min(turns)  # numbers differ, so payers never compare
                return start, payer, priority
        return None

    def _remove(self, request_id: str) -> _Place | None:
        held = self._held.pop(request_id, None)
        if held is None:
            return None
        name = held.tenant or ""
        strange = self._unknown.get(name, {})
        if strange.pop(request_id, None) is None:
            return self._unqueue(held, held.tenant)
        if not strange:
            del self._unknown[name]
        return self._unqueue(held, _UNKNOWN)

    def _queue(self, place: _Place) -> None:
        held = place.held
        lanes = self._lanes.setdefault(held.priority, OrderedDict())
        lane = lanes.setdefault((place.payer, held.returning), OrderedDict())
        lane[held.request_id] = place
        if len(lane) == 1:
            heapq.heappush(self._turns, self._turn(lane))
            self._forget()

    def _unqueue(self, held: Held, payer: str | None) -> _Place:
        lanes, key = self._lanes[held.priority], (payer, held.returning)
        lane = lanes[key]
        place = lane.pop(held.request_id)
        if not lane:
            del lanes[key]  # the heap's entry is dead: who comes next opens another lane
        if not lanes:
            del self._lanes[held.priority]
        return place

    def _is_unknown(self, tenant: str | None) -> TypeGuard[str]:
        return tenant is not None and tenant not in self._ends and tenant not in self._once

    def _end(self, tenant: str | None, end: float) -> None:
        """Remember where a tenant's last started request ends; the tenant is known from now on."""
        if tenant is not None and self._is_unknown(tenant):
            book: OrderedDict[Any, float] = self._once
            for place in self._unknown.pop(tenant, {}).values():  # in order of arrival
                self._unqueue(place.held, _UNKNOWN)
                self._queue(place._replace(payer=tenant))
        else:
            book = self._ends
            if tenant is not None:
                self._once.pop(tenant, None)
        book[tenant] = end
        book.move_to_end(tenant)
        if len(book) > _MOST_TENANTS:
            book.popitem(last=False)

    def _ended(self, payer: str | None) -> float:
        known = self._ends.get(payer)
        return known if known is not None else self._once.get(payer or "", 0.0)

    def _start(self, place: _Place) -> float:
        return max(place.since, self._ended(place.payer))

    def _turn(self, lane: _Lane) -> _Turn:
        place = _first(lane)
        held = place.held
        return held.priority, self._start(place), not held.returning, place.number, id(lane), lane

    def _forget(self) -> None:
        if len(self._turns) > 2 * sum(map(len, self._lanes.values())) + _DEAD_ENTRIES:
            self._turns = [turn for turn in self._turns if turn[-1]]
            heapq.heapify(self._turns)


def _first(lane: _Lane) -> _Place:
    return next(iter(lane.values()))


def _claim(held: Held, due: float, now: float) -> tuple[bool, float]:
    waited = now - held.since
    return (True, waited) if held.since <= due else (False, waited / held.blocks)
