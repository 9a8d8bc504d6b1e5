"""``IdleEngine``: wakes an engine that waits for requests, so that a step takes an order."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import numpy as np

from ....graph.types import Keys

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCoreProc

logger = logging.getLogger(__name__)

_APART_S: Final = 0.1  # seconds between two wake-ups at least; chosen
_IN_PROCESS: Final = "it has no process of its own, and steps when its caller does"
_IN_STEP: Final = "data-parallel ranks begin their steps together"
_NOT_WOKEN: Final = "kvgraph: while this engine has nothing to do, nothing is prefetched: %s"


class IdleEngine:
    """Knows for which order a step is due that no request asks for.

    An engine without requests waits at its input queue. vLLM ends that wait, when it is to shut
    down, by an entry that stands for nothing (``WAKEUP``), and then takes a step if there is work;
    ``due`` says that there is. A wake-up that finds the engine at work costs it nothing.

    Args:
        clock: Monotonic seconds.
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
        """Whether a step is to be taken; for the engine's thread. None is taken while the engine
        is paused: its memory may be gone."""
        loop = self._loop
        return self._due and loop is not None and not loop.is_scheduler_paused()

    def bind(self, loop: EngineCoreProc) -> None:
        """Note that ``loop``, which is about to begin, takes the engine's steps."""
        from vllm.v1.engine import EngineCoreRequestType

        if loop.vllm_config.parallel_config.data_parallel_size > 1:
            self._refusal = _IN_STEP
            return
        queue, nothing = loop.input_queue, (EngineCoreRequestType.WAKEUP, None)
        self._loop, self._wake = loop, lambda: queue.put_nowait(nothing)

    def unbind(self) -> None:
        """Note that nobody takes orders any more: no step is due from now on."""
        self._loop = self._wake = None
        self._refusal = ""

    def ordered(self, order: Keys) -> None:
        """Note that the sidecar sent an order; for the thread that received it.

        The same order wakes an engine once, unless a step did something since: what there was no
        room for finds none while nothing happens.
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
        """Note that a step is about to take the newest order."""
        self._due = False

    def worked(self, anything: bool) -> None:
        """Note that a step was planned, and whether there is ``anything`` in it to do."""
        if anything:
            self._asked = None
