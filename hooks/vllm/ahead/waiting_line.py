"""``WaitingLine``: requests in vLLM's queue, in its order, and what each needs."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from itertools import count, islice
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from vllm.v1.request import Request

_IN_SIGHT: Final = 64  # requests at the head of the line whose copies may come; chosen

_Key = tuple[float, float, str]  # smaller: nearer to the head


class Waiting(NamedTuple):
    """The next request whose copies may come before its turn.

    Attributes:
        blocks: That it needs.
        ahead: Blocks that those before it need.
    """

    request: Request
    blocks: int
    ahead: int


@dataclass(slots=True, eq=False)
class _Place:
    request: Request
    key: _Key
    blocks: int
    joined: int  # steps that there were before
    open: bool  # neither looked up by vLLM, nor served here


class WaitingLine:
    """Who waits for blocks. A request's copies may come as soon as one step has passed it over: if
    nobody is before it, its turn comes in that step, and the load that it asks for itself is as
    soon and brings all of them at once.

    Args:
        by_priority: Whether vLLM's queue goes by priority; else, by arrival.
        served: Whether copies are to come before a turn at all.
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
        """Note that a request waits for so many blocks."""
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
        """Note that a request waits no longer, if it did."""
        if place := self._places.pop(request_id, None):
            del self._order[bisect_left(self._order, (place.key, request_id))]
            self.needed -= place.blocks

    def close(self, request_id: str) -> None:
        """Note that a request's copies need not be looked for: its turn has come, or that was
        done."""
        if place := self._places.get(request_id):
            place.open = False

    def passed(self) -> None:
        """Note that a step's allocations are over: who waits now was passed over."""
        self._steps += 1

    def next(self) -> Waiting | None:
        """The first of those in sight whose copies may come."""
        ahead = 0
        for _, request_id in islice(self._order, self._in_sight):
            place = self._places[request_id]
            if place.open and place.joined < self._steps:
                return Waiting(place.request, place.blocks, ahead)
            ahead += place.blocks
        return None
