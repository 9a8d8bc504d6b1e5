"""How long an engine's steps wait for our hooks."""

from __future__ import annotations

import functools
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

CALLS: Final = (
    "on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc",
    "build_connector_meta", "update_connector_output", "has_pending_push_work",
    "request_finished", "request_finished_all_groups", "take_events",
)  # fmt: skip
"""What vLLM's scheduler calls of a connector while it steps."""


class StepWatch:
    """Sums up what the calls of one step took.

    A call counts with the time on the wall; one during which the kernel gave its core to somebody
    else, without its having waited for anything, with the time that it ran.
    """

    def __init__(self) -> None:
        self._spent = 0.0
        self._inside = False

    def over(self, connector: Any, calls: Sequence[str] = CALLS) -> None:
        """Measure ``connector`` from now on."""
        for name in calls:
            setattr(connector, name, self._measured(getattr(connector, name)))

    def take(self) -> float:
        """Seconds spent since the last call."""
        spent, self._spent = self._spent, 0.0
        return spent

    def _measured(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._inside:  # one of the others called it
                return original(*args, **kwargs)
            self._inside = True
            started = Moment.now()
            try:
                return original(*args, **kwargs)
            finally:
                self._spent += started.until(Moment.now())
                self._inside = False

        return call


@dataclass(frozen=True, slots=True)
class Moment:
    """A thread's clocks in seconds, and how often it gave its core away, forced and waiting."""

    wall: float
    ran: float
    gave_way: int
    blocked: int

    @classmethod
    def now(cls) -> Moment:
        """Of the calling thread."""
        usage = resource.getrusage(resource.RUSAGE_THREAD)
        return cls(time.perf_counter(), time.thread_time(), usage.ru_nivcsw, usage.ru_nvcsw)

    def until(self, then: Moment) -> float:
        """Seconds that count."""
        if then.gave_way > self.gave_way and then.blocked == self.blocked:
            return then.ran - self.ran
        return then.wall - self.wall


def spin(seconds: float) -> float:
    """Work for so long, and what that counts as: what the machine makes of it without us."""
    started, end = Moment.now(), time.thread_time() + seconds
    while time.thread_time() < end:
        pass
    return started.until(Moment.now())
