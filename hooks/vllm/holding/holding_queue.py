"""The scheduler's queue of waiting requests, with a place beside it for those that are held.

vLLM can skip a request for a step when a connector asks for that; but then it looks the request
up again in every step, and a thousand of them in every step a thousand times. What stands here
is counted, listed and removed as waiting, and not looked at.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

_RELIED_ON: Final = (
    "waiting", "kv_holding_waiting", "deferred_waiting", "running", "requests",
    "num_waiting_for_streaming_input",
)  # fmt: skip


class HoldingQueue:
    """Stands in a scheduler's ``waiting`` and is vLLM's own queue, but for new requests.

    Args:
        scheduler: Whose queue it is, on this instance alone.
        holds: Whether a new request is to be held; must not raise.
        gone: Is told the id of a held request that was removed; must not raise.

    Raises:
        TypeError: This scheduler lacks something that is relied on; names it.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        holds: Callable[[Request], bool],
        gone: Callable[[str], None],
    ) -> None:
        if missing := [name for name in _RELIED_ON if not hasattr(scheduler, name)]:
            raise TypeError(f"{type(scheduler).__name__} has no {', '.join(missing)}")
        self._scheduler = scheduler
        self._queue = scheduler.waiting
        self._holds = holds
        self._gone = gone
        self._held: dict[str, Request] = {}  # in the order of their arrival
        self._last: Request | None = None  # that was let in
        scheduler.waiting = self

    # What we ask --------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether the engine has nothing to do but for those that are held."""
        scheduler = self._scheduler
        moving = len(scheduler.running) + len(self._queue) + len(scheduler.kv_holding_waiting)
        at_rest: int = scheduler.num_waiting_for_streaming_input  # these wait for their user
        return moving <= at_rest

    @property
    def free(self) -> bool:
        """Whether nobody else waits, and the prompt of who was let in last is computed."""
        if self._queue or self._scheduler.kv_holding_waiting:
            return False
        last = self._last
        if last is None or last.is_finished():
            return True
        return bool(last.num_computed_tokens >= last.num_prompt_tokens)

    @property
    def head(self) -> Request | None:
        """Who of those that never ran starts next in vLLM's queue."""
        head = self._queue.peek_request() if self._queue else None
        return None if head is None or head.num_preemptions or head.num_computed_tokens else head

    def hold_head(self) -> None:
        """vLLM's next one is held after all."""
        request = self._queue.pop_request()
        self._held[request.request_id] = request
        self._scheduler.deferred_waiting.add(request)

    def release(self, request_id: str) -> None:
        """A held request may start: it stands at the end of vLLM's queue, or by its priority."""
        request = self._last = self._held.pop(request_id)
        self._resume(request)
        self._queue.add_request(request)

    def open(self) -> None:
        """All held requests may start, in the order in which all that wait arrived."""
        held, self._held = list(self._held.values()), {}
        for request in held:
            self._resume(request)
            self._queue.add_request(request)
        if isinstance(self._queue, deque):
            in_order = sorted(self._queue, key=_arrival)
            self._queue.clear()
            self._queue.extend(in_order)

    def detach(self) -> None:
        """Open, and leave the scheduler its own queue."""
        self._holds, self._gone = _never, _ignore
        self.open()
        if self._scheduler.waiting is self:
            self._scheduler.waiting = self._queue

    def _resume(self, request: Request) -> None:
        if request.status.name == "WAITING":  # else it waits for its grammar, and vLLM counts it
            self._scheduler.deferred_waiting.discard(request)

    # What vLLM asks -----------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """A request waits: a new one is perhaps held; one that the scheduler knows never is."""
        if request.request_id in self._scheduler.requests or not self._holds(request):
            self._queue.add_request(request)
            return
        self._held[request.request_id] = request
        self._scheduler.deferred_waiting.add(request)

    def remove_request(self, request: Request) -> None:
        """A request waits no longer."""
        if not self._remove_held(request):
            self._queue.remove_request(request)

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Some requests, whether they wait or not, wait no longer."""
        requests = set(requests)
        if self._held:
            requests = {each for each in requests if not self._remove_held(each)}
        self._queue.remove_requests(requests)

    def pop_request(self) -> Request:
        """See vLLM's ``RequestQueue``, here and below."""
        return self._queue.pop_request()

    def peek_request(self) -> Request:
        """The next one that may start."""
        return self._queue.peek_request()

    def prepend_request(self, request: Request) -> None:
        """One that ran before."""
        self._queue.prepend_request(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        """Some that this step skipped."""
        self._queue.prepend_requests(requests)

    def __bool__(self) -> bool:
        return bool(self._queue)

    def __len__(self) -> int:
        return len(self._queue) + len(self._held)

    def __iter__(self) -> Iterator[Request]:
        yield from self._queue
        yield from self._held.values()

    def _remove_held(self, request: Request) -> bool:
        if self._held.pop(request.request_id, None) is None:
            return False
        self._gone(request.request_id)
        return True


def _arrival(request: Request) -> tuple[bool, float]:
    """Preempted ones stand first, as vLLM has put them; the others as they came."""
    preempted = request.num_preemptions > 0
    return not preempted, 0.0 if preempted else request.arrival_time


def _never(_: Any) -> bool:
    return False


def _ignore(_: Any) -> None:
    pass
