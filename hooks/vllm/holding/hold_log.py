"""What admission reports: counters, events, a log line when holding begins and when it ended."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Final

from ....graph.messages.advice import AdmissionAdvice
from ....graph.messages.events import (
    HOLD_ENDS,
    AdmissionReport,
    AnyEvent,
    RequestHeld,
    RequestReleased,
)
from ....graph.messages.fields import MAX_NAME
from ....graph.waiting.release_order import Held

logger = logging.getLogger(__name__)

_OPEN_AFTER_S: Final = 10.0  # with no request held for so long, holding has ended. Chosen


class HoldingLog:
    """Counts what happens to held requests, and reports it.

    Args:
        emit: Takes each event; must not wait.
        most_s: The longest that a request is held, in seconds.
    """

    def __init__(self, emit: Callable[[AnyEvent], None], most_s: float) -> None:
        self._emit = emit
        self._most_s = most_s
        self._oldest_since: float | None = None  # since when the first of those waits
        self._not_held = 0
        self._waiting: dict[str, RequestHeld] = {}
        self._blocks = 0  # that they want
        self._held = 0
        self._ends: Counter[str] = Counter()
        self._waited_s = self._longest_s = 0.0
        self._holding = False
        self._last_held = 0.0
        self._held_before = 0  # what was held before it last began to hold
        self._longest_now = 0.0  # the longest wait since then

    def held(self, held: Held, advice: AdmissionAdvice) -> None:
        """Note that ``held`` waits from now on, because of ``advice``."""
        if not self._holding:
            self._holding, self._held_before, self._longest_now = True, self._held, 0.0
            logger.info(
                "kvgraph: new sessions wait: %d are live where %d fit; a request is held for %d s "
                "at most",
                advice.live_sessions,
                advice.fitting_sessions,
                self._most_s,
            )
        self._held += 1
        self._blocks += held.blocks
        name = held.request_id[:MAX_NAME]
        said = self._waiting[held.request_id] = RequestHeld(
            name, held.blocks, held.session, held.tenant, advice.fitting_sessions,
            advice.live_sessions,
        )  # fmt: skip
        self._emit(said)

    def held_after_all(self, held: Held, advice: AdmissionAdvice) -> None:
        """Note that ``held`` waits from now on, which had been let in when it came."""
        self._not_held -= 1
        self.held(held, advice)

    def ended(self, held: Held, reason: str, now: float) -> None:
        """Note that ``held`` waits no longer, for one of ``HOLD_ENDS``."""
        waited = max(0.0, now - held.since)
        self._waiting.pop(held.request_id, None)
        self._blocks -= held.blocks
        self._ends[reason] += 1
        self._waited_s += waited
        self._longest_s = max(self._longest_s, waited)
        self._longest_now = max(self._longest_now, waited)
        self._last_held = now
        self._emit(RequestReleased(held.request_id[:MAX_NAME], waited, reason))

    def not_held(self) -> None:
        """Note that a request came and was let in."""
        self._not_held += 1

    def oldest(self, since: float) -> None:
        """Note since when the request waits that has waited longest."""
        self._oldest_since = since

    def quiet(self, now: float) -> None:
        """Note that no request is held now."""
        self._oldest_since = None
        if self._holding and now - self._last_held >= _OPEN_AFTER_S:
            self._holding = False
            logger.info(
                "kvgraph: new sessions start at once again; %d requests were held, for %.1f s at "
                "most",
                self._held - self._held_before,
                self._longest_now,
            )

    def told(self) -> list[AnyEvent]:
        """What was emitted of those that are held now; read on another thread, in one call."""
        return list(self._waiting.values())

    def report(self, now: float, queued_share: float) -> AdmissionReport:
        """Levels and counters; read on another thread, one attribute at a time."""
        since = self._oldest_since
        return AdmissionReport(
            waiting=len(self._waiting),
            waiting_blocks=max(0, self._blocks),
            oldest_s=max(0.0, now - since) if since is not None else 0.0,
            held=self._held,
            released=tuple(self._ends[reason] for reason in HOLD_ENDS),
            waited_s=self._waited_s,
            longest_s=self._longest_s,
            not_held=self._not_held,
            queued_share=queued_share,
        )
