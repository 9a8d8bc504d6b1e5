"""How long an engine's steps wait for our hooks, and how long they would for somebody else's."""

from __future__ import annotations

import functools
import resource
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

CALLS: Final = (
    "on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc",
    "build_connector_meta", "update_connector_output", "has_pending_push_work",
    "request_finished", "request_finished_all_groups", "take_events",
)  # fmt: skip
"""What vLLM's scheduler calls of a connector while it steps."""

CALLS_A_STEP: Final = 99
"""Three for each of 32 requests that start, and three a step. Steps in which requests end make
about a third as many; the stand-in makes all of them in every step."""
CALL_S: Final = 5e-6  # about what one takes; chosen
TICK_S: Final = 0.2  # as often as our client's thread wakes, …
TICK_PIECES: Final = 10  # … takes Python's lock so many times, …
PIECE_S: Final = 5e-5  # … each for about so long


class StepWatch:
    """Sums up what the calls of one step took; what the watching itself takes is left out."""

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
            ran, waited = _of_this_thread()
            started = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                ended = time.perf_counter()
                then = Moment(ended, *_of_this_thread())
                self._spent += Moment(started, ran, waited).until(then)
                self._inside = False

        return call


class Moment(NamedTuple):
    """A thread's clocks in seconds, and how often it gave its core away to wait for something.

    The clock on the wall is the last to be read before what is measured and the first after it, so
    that reading the others, which asks the kernel, is no part of it.
    """

    wall: float
    ran: float
    waited: int

    def until(self, then: Moment) -> float:
        """Seconds that count: those on the wall, if anything was waited for on the way.

        A thread that waited for nothing, no lock and no other thread, was not kept by anybody of
        its process: where it still ran for less than passed, its core was given to another process
        or the whole machine stood still, and what it ran counts.
        """
        passed = then.wall - self.wall
        return passed if then.waited > self.waited else min(passed, then.ran - self.ran)


class StandIn:
    """What stands in a stock engine in our place: as many calls a step, as much work, a thread.

    The thread wakes as often as our client's and does about as much, so that what is waited for
    in Python, and what the machine makes of it, is the same; only nothing of ours runs.
    """

    def __init__(self) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tick, daemon=True)
        self._thread.start()

    def step(self) -> float:
        """Seconds that the calls of one step took, counted as ours are."""
        return sum((spin(CALL_S) for _ in range(CALLS_A_STEP)), 0.0)

    def leave(self) -> None:
        """The engine is alone again."""
        self._over.set()
        self._thread.join()

    def _tick(self) -> None:
        while not self._over.wait(TICK_S):
            for _ in range(TICK_PIECES):
                spin(PIECE_S)
                time.sleep(0)


def spin(seconds: float) -> float:
    """Work for so long, and what that counts as."""
    ran, waited = _of_this_thread()
    started, end = time.perf_counter(), time.thread_time() + seconds
    while time.thread_time() < end:
        pass
    ended = time.perf_counter()
    return Moment(started, ran, waited).until(Moment(ended, *_of_this_thread()))


def _of_this_thread() -> tuple[float, int]:
    """Seconds that it ran, and how often it gave its core away to wait."""
    return time.thread_time(), resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
