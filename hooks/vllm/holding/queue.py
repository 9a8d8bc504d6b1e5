"""``HoldingQueue``: the scheduler's waiting queue with held requests beside it. vLLM counts, lists
and removes these as waiting, but does not look them up in every step, which would be slow for a
thousand requests.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

_RELIED_ON: Final = (
    "waiting", "kv_holding_waiting", "deferred_waiting", "running", "requests",
    "num_waiting_for_streaming_input", "policy", "max_num_scheduled_tokens",
)  # fmt: skip


class HoldingQueue:
    """vLLM's own queue, with held requests kept beside it; each added request is either queued or
    held. Raises TypeError if the scheduler lacks an attribute that is relied on.

    It takes the place of ``scheduler.waiting`` only while a request is held, because vLLM uses its
    queue several times in each step. Otherwise vLLM's own queue is used, with one method replaced.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        # none of these may raise
        holds: Callable[[Request], bool],  # whether a new request is to be held
        gone: Callable[[str], None],  # a held request was removed
        queued: Sequence[Callable[[Request], object]] = (),  # one moves into vLLM's queue
        unqueued: Sequence[Callable[[str], object]] = (),  # a queued one is held after all
    ) -> None:
        if missing := [name for name in _RELIED_ON if not hasattr(scheduler, name)]:
            raise TypeError(f"{type(scheduler).__name__} has no {', '.join(missing)}")
        self._scheduler = scheduler
        self._queue = scheduler.waiting
        self._append = self._queue.add_request
        self._holds = holds
        self._gone = gone
        self._held: dict[str, Request] = {}  # in the order of their arrival
        self._last: Request | None = None  # the last one released
        self._ends = False  # release all when vLLM next looks
        self._goes_by_priority = bool(scheduler.policy.value == "priority")
        self.queued, self.unqueued = queued, unqueued
        self._queue.add_request = self.add_request

    # Our side -----------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether the engine has no work but held requests."""
        scheduler = self._scheduler
        moving = len(scheduler.running) + len(self._queue) + len(scheduler.kv_holding_waiting)
        at_rest: int = scheduler.num_waiting_for_streaming_input  # these wait for their user
        return moving <= at_rest

    @property
    def has_queued(self) -> bool:
        """Whether requests other than held ones wait to be scheduled."""
        queued = len(self._queue) + len(self._scheduler.kv_holding_waiting)
        return bool(queued > self._scheduler.num_waiting_for_streaming_input)

    @property
    def step_tokens(self) -> int:
        return int(self._scheduler.max_num_scheduled_tokens)

    @property
    def prefill_idle(self) -> bool:
        """Whether none is queued and the last released prompt has been computed."""
        if self.has_queued:
            return False
        last = self._last
        if last is None or last.is_finished():
            return True
        # Tokens count as computed once their step is scheduled; only an output token proves it.
        return bool(last.num_output_tokens > 0)

    @property
    def prefills(self) -> bool:
        """Whether the prompt of any running request is still being computed."""
        return any(not each.num_output_tokens for each in self._scheduler.running)

    def priority_of(self, request: Request) -> int:
        """Return a request's priority; 0 if this engine does not schedule by priority."""
        return request.priority if self._goes_by_priority else 0

    def outranks_running(self, request: Request) -> bool:
        if not self._goes_by_priority:
            return False
        return any(each.priority > request.priority for each in self._scheduler.running)

    def next_requests(self, most: int) -> list[Request]:
        """Return up to ``most`` next requests of vLLM's queue that never ran."""
        following = itertools.islice(self._queue, most)
        return [
            each for each in following if not (each.num_preemptions or each.num_computed_tokens)
        ]

    def hold(self, request: Request) -> None:
        """Move a request from vLLM's queue to the held ones."""
        self._queue.remove_request(request)
        self._hold(request)
        for note in self.unqueued:
            note(request.request_id)

    def is_held(self, request_id: str) -> bool:
        return request_id in self._held

    def release(self, request_id: str) -> None:
        """Move a held request into vLLM's queue: to its end, or by its priority."""
        request = self._last = self._held[request_id]
        self._append(request)
        del self._held[request_id]
        self._step_aside()
        self._resume(request)

    def release_all(self) -> None:
        """Move all held requests into vLLM's queue and sort it by arrival."""
        held, self._held = list(self._held.values()), {}
        for request in held:  # before any callback, which may raise: no request is lost
            self._append(request)
        self._step_aside()
        if isinstance(self._queue, deque):
            in_order = sorted(self._queue, key=_arrival)
            self._queue.clear()
            self._queue.extend(in_order)
        for request in held:
            self._resume(request)

    def detach(self) -> None:
        """Release all requests, and restore the scheduler's own queue at its next use."""
        # Not at once: an error of ours may come between vLLM's look at the head and its taking it
        # out, and a request put before that one would be taken in its place.
        self._holds, self._gone = _never, lambda _: None
        self.queued = self.unqueued = ()  # they may be what failed
        self._ends = bool(self._held)
        self._step_aside()

    def _hold(self, request: Request) -> None:
        self._held[request.request_id] = request
        self._scheduler.deferred_waiting.add(request)
        if self._scheduler.waiting is self._queue:
            self._scheduler.waiting = self

    def _step_aside(self) -> None:
        """Let vLLM ask its own queue while nobody is held; it may still hold on to this one."""
        if self._held:
            return
        if self._scheduler.waiting is self:
            self._scheduler.waiting = self._queue
        if self._holds is _never:
            self._queue.add_request = self._append

    def _resume(self, request: Request) -> None:
        if request.status.name == "WAITING":  # else vLLM counts it: it waits for its grammar
            self._scheduler.deferred_waiting.discard(request)
        self.say_queued(request)

    def say_queued(self, request: Request) -> None:
        """Report a request that waits in vLLM's queue from now on."""
        for note in self.queued:
            note(request)

    # vLLM's side, as in its ``RequestQueue`` -----------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Queue a request, or hold it if it is new; one that the scheduler knows is never held."""
        if request.request_id in self._scheduler.requests or not self._holds(request):
            self._append(request)
        else:
            self._hold(request)

    def remove_request(self, request: Request) -> None:
        if not self._remove_held(request):
            self._queue.remove_request(request)

    def remove_requests(self, requests: Iterable[Request]) -> None:
        requests = set(requests)
        if self._held:
            requests = {each for each in requests if not self._remove_held(each)}
        self._queue.remove_requests(requests)

    def pop_request(self) -> Request:
        return self._queue.pop_request()

    def peek_request(self) -> Request:
        return self._queue.peek_request()

    def prepend_request(self, request: Request) -> None:
        """Put a request that ran before at the head of the queue."""
        self._queue.prepend_request(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        """Put requests that this step skipped at the head of the queue."""
        self._queue.prepend_requests(requests)

    def __bool__(self) -> bool:
        """Return whether a request may start; vLLM asks before each look at the head."""
        if self._ends:
            self._ends = False
            self.release_all()
        return bool(self._queue)

    def __len__(self) -> int:
        return len(self._queue) + len(self._held)

    def __iter__(self) -> Iterator[Request]:
        yield from self._queue
        yield from self._held.values()

    def _remove_held(self, request: Request) -> bool:
        if self._held.pop(request.request_id, None) is None:
            return False
        self._step_aside()
        self._gone(request.request_id)
        return True


def _arrival(request: Request) -> tuple[bool, float]:
    """Sort key: preempted requests first, in vLLM's order; then the others by arrival."""
    preempted = request.num_preemptions > 0
    return not preempted, 0.0 if preempted else request.arrival_time


def _never(_: Any) -> bool:
    return False
