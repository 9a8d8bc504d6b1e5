"""Requests that engines hold until there is room for them, for people to look at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ..logs.request_facts import Hold
from ..messages.events import RequestHeld, RequestReleased

_MOST: Final = 16_384  # remembered for one engine; chosen
_MOST_LET_GO: Final = 1_024  # of them: that wait no longer and have not begun; chosen


@dataclass(frozen=True, slots=True)
class HeldRequest:
    """A request that waits for room.

    Attributes:
        request: As its engine named it, and what it wants.
        since: When the sidecar heard of it, in monotonic seconds.
    """

    request: RequestHeld
    since: float


class HeldBook:
    """Held requests by engine, in the order of their arrival."""

    def __init__(self) -> None:
        self._held: dict[int, dict[str, HeldRequest]] = {}
        self._let_go: dict[int, dict[str, Hold]] = {}

    def held(self, engine: int, event: RequestHeld, now: float) -> None:
        """Note that a request waits from now on."""
        of_engine = self._held.setdefault(engine, {})
        if len(of_engine) < _MOST:
            of_engine[event.request_id] = HeldRequest(event, now)

    def released(self, engine: int, event: RequestReleased) -> None:
        """Note that a request waits no longer. How long it was held is kept until it begins; where
        its client went away, it never does."""
        held = self._held.get(engine, {}).pop(event.request_id, None)
        if event.reason == "gone":
            return
        fitting, live = (held.request.fitting, held.request.live) if held else (0, 0)
        of_engine = self._let_go.setdefault(engine, {})
        of_engine[event.request_id] = Hold(event.waited_s, event.reason, fitting, live)
        if len(of_engine) > _MOST_LET_GO:
            del of_engine[next(iter(of_engine))]

    def begun(self, engine: int, request_id: str) -> Hold | None:
        """Note that a request began, and forget it; returns how it was held, if it was."""
        return self._let_go[engine].pop(request_id, None) if engine in self._let_go else None

    def all(self) -> list[HeldRequest]:
        """All held requests, engine by engine, each engine's in the order of their arrival."""
        return [held for waiting in self._held.values() for held in waiting.values()]

    def since(self, session: str, tenant: str | None) -> dict[int, float]:
        """Engines where a request of a session waits, and since when the first of them waits.

        Of any tenant's session if no tenant is named.
        """
        found: dict[int, float] = {}
        for engine, waiting in self._held.items():
            for held in waiting.values():
                if held.request.session == session and tenant in (None, held.request.tenant):
                    found[engine] = min(held.since, found.get(engine, held.since))
        return found

    def forget(self, engine: int) -> None:
        """Forget an engine that is gone, or reports everything anew."""
        self._held.pop(engine, None)
        self._let_go.pop(engine, None)
