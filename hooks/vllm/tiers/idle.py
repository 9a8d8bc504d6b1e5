"""``IdleEngine``: wakes an engine without requests, so that a step carries out a prefetch order."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ....graph.types import Keys
from ...tiers.ledger import TierLedger
from ..patching import Method, patch
from ..relied_on import Part
from ..versions import live_misfits

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.request import Request

    from ..groups import ObservedGroup
    from .spiller import Spiller

logger = logging.getLogger(__name__)

_APART_S: Final = 0.1  # least time between two wake-ups, in seconds; chosen
_IN_PROCESS: Final = "it has no process of its own, and steps when its caller does"
_IN_STEP: Final = "data-parallel ranks begin their steps together"
_NOT_WOKEN: Final = "kvgraph: while this engine has nothing to do, nothing is prefetched: %s"


class IdleEngine:
    """Tracks for which prefetch order an idle engine must take a step.

    An engine without requests waits at its input queue. To shut down, vLLM ends that wait with an
    empty entry (``WAKEUP``), and then takes a step if there is work; ``due`` says that there is.
    Waking a busy engine costs it nothing.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._loop: EngineCoreProc | None = None
        self._wake: Callable[[], None] | None = None
        self._refusal = _IN_PROCESS  # until a loop is bound; empty once it was said
        self._due = False
        self._asked: Keys | None = None  # what it was woken for last, and did nothing since
        self._woken_at = -np.inf

    @property
    def due(self) -> bool:
        """Whether a step is due; called on the engine's thread. False while the engine is paused,
        because its memory may be gone.
        """
        loop = self._loop
        return self._due and loop is not None and not loop.is_scheduler_paused()

    def bind(self, loop: EngineCoreProc) -> None:
        from vllm.v1.engine import EngineCoreRequestType

        if loop.vllm_config.parallel_config.data_parallel_size > 1:
            self._refusal = _IN_STEP
            return
        queue, nothing = loop.input_queue, (EngineCoreRequestType.WAKEUP, None)
        self._loop, self._wake = loop, lambda: queue.put_nowait(nothing)

    def unbind(self) -> None:
        """Stop waking the engine: orders are no longer carried out."""
        self._loop = self._wake = None
        self._refusal = ""

    def ordered(self, order: Keys) -> None:
        """Note that the sidecar sent an order; called on the thread that received it.

        The same order wakes an engine only once, unless a step did some work since: until then,
        copies that found no room would find none again.
        """
        if not len(order) or (self._asked is not None and np.array_equal(order, self._asked)):
            return
        now = self._clock()
        if now - self._woken_at < _APART_S:
            return  # the sidecar repeats its order
        self._woken_at, wake = now, self._wake
        if wake is not None:
            self._asked, self._due = order, True
            wake()
        elif self._refusal:
            logger.info(_NOT_WOKEN, self._refusal)
            self._refusal = ""

    def stepped(self) -> None:
        """Note that a step is about to carry out the newest order."""
        self._due = False

    def worked(self, anything: bool) -> None:
        """Note that a step was planned, and whether it has ``anything`` to do."""
        if anything:
            self._asked = None


_NO_LOOP: Final = "kvgraph: an idle engine is not woken for prefetches (%s)"


def follow_loops() -> None:
    """Give every loop that starts from now on to its engine's connector (``bind_loop``). A
    connector calls this while its engine is created: loops start later, in the same process.
    """
    if problems := live_misfits(Part.WAKING):
        logger.warning(_NO_LOOP, "; ".join(problems))
        return
    from vllm.v1.engine.core import DPEngineCoreProc, EngineCoreProc

    for kind in (EngineCoreProc, DPEngineCoreProc):
        patch(kind, "run_busy_loop", _bound)


def _bound(original: Method) -> Method:
    def run_busy_loop(self: EngineCoreProc, *args: Any, **kwargs: Any) -> Any:
        try:
            bind = getattr(self.scheduler.connector, "bind_loop", None)
            if bind is not None:
                bind(self)
        except Exception as error:
            logger.warning(_NO_LOOP, type(error).__name__)
        return original(self, *args, **kwargs)

    return run_busy_loop


IDLE_S: Final = 3600.0
"""Seconds after a request's end at which its computed blocks are written; chosen."""
_MOST: Final = 262_144  # blocks remembered, some 20 MiB; beyond, the oldest are written now; chosen
_AT_ONCE: Final = 32  # blocks; half of what may be on its way to the disk; chosen
_COPIED_S: Final = 1.0  # by then, copies that were started exist, or never will; chosen


class IdleWriter:
    """Writes to disk what idle sessions left in pool and memory, so that it survives a restart.

    Without it, only blocks evicted from memory reach the disk. A request's computed blocks are due
    an hour after its end, root first, so that the disk holds whole chains; blocks that have left
    the engine by then are skipped. Writes start in the engine's steps, a few at a time, only while
    no other copy is on its way to the disk; they never keep an engine awake.
    """

    def __init__(
        self,
        pool: BlockPool,
        group: ObservedGroup,
        ledger: TierLedger,
        spiller: Spiller,
    ) -> None:
        self._pool, self._group, self._ledger, self._spiller = pool, group, ledger, spiller
        self._running: dict[str, tuple[Request, int]] = {}  # and of its blocks, those found
        self._left: deque[tuple[float, Sequence[bytes]]] = deque()  # when they are due
        self._remembered = 0  # blocks in these
        self._due: deque[bytes] = deque(maxlen=_MOST)
        self._copying: tuple[float, list[bytes]] = (0.0, [])  # when these are looked for

    def request_scheduled(self, request: Request, found: int) -> None:
        alone = request.lora_request is None  # an adapter's blocks may not be on disk
        if alone and self._ledger.directory.cold_capacity:
            self._running.setdefault(request.request_id, (request, found))

    def request_finished(self, request_id: str) -> None:
        """Note that a request ended; its approximate blocks stay off the disk."""
        request, found = self._running.pop(request_id, (None, 0))
        if request is None:
            return
        exact = self._ledger.exact.get(request_id)
        if hashes := self._group.computed(request, exact)[found:]:
            self._left.append((self._ledger.clock() + IDLE_S, hashes))
            self._remembered += len(hashes)

    @property
    def is_busy(self) -> bool:
        """Whether the next steps have blocks to write, apart from those due meanwhile."""
        return bool(self._due or self._copying[1])

    def step(self) -> None:
        now = self._ledger.clock()
        while self._left and (self._left[0][0] <= now or self._remembered > _MOST):
            _, hashes = self._left.popleft()
            self._remembered -= len(hashes)
            self._due.extend(hashes)
        at, copied = self._copying
        if copied and now >= at:
            self._copying = (now, [])
            self._write(copied)
        elif self._due and not copied and self._ledger.disk.idle:
            self._begin(now)

    def end(self) -> None:
        """Forget all blocks: the weights may no longer be those that the disk's file names."""
        self._running.clear()
        self._left.clear()
        self._due.clear()
        self._remembered, self._copying = 0, (0.0, [])

    def _begin(self, now: float) -> None:
        """Write the next that are in memory; have copied first those that only the pool has."""
        batch = [self._due.popleft() for _ in range(min(_AT_ONCE, len(self._due)))]
        directory = self._ledger.directory
        lacking = [each for each in batch if each not in directory and self._in_pool(each)]
        self._write([each for each in batch if each in directory])
        if lacking:
            self._spiller.copy(lacking, self._group.suffix)
            self._copying = (now + _COPIED_S, lacking)

    def _write(self, hashes: Sequence[bytes]) -> None:
        directory = self._ledger.directory
        self._ledger.disk.keep([each for each in map(directory.warm, hashes) if each is not None])
        # What the pool has too is stored twice: these copies are the first to go.
        directory.used([each for each in hashes if self._in_pool(each)])

    def _in_pool(self, block_hash: bytes) -> bool:
        return self._group.is_in(self._pool, block_hash)
