"""Finds the schedulers whose new sessions may be held: vLLM shows a connector only its pool."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any, Final

from ..reliance.fit import Part
from ..reliance.live_vllm import live_misfits
from .beside import WATCH
from .settings import admission_switched_on

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

logger = logging.getLogger(__name__)

_MARK: Final = "_kvgraph_wrapped"


def follow_schedulers() -> None:
    """Have every scheduler that is made from now on hold new sessions, where that is asked for."""
    if not admission_switched_on():
        return
    from vllm.v1.core.sched.scheduler import Scheduler

    original = Scheduler.__init__
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def init(self: Scheduler, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        try:
            bind_scheduler(self)
        except Exception as error:
            logger.warning(
                "kvgraph: no admission in this engine, new sessions are never held (%s: %s)",
                type(error).__name__,
                error,
            )

    setattr(init, _MARK, True)
    Scheduler.__init__ = init


def bind_scheduler(scheduler: Scheduler) -> None:
    """Show ``scheduler`` to our connector: its own, or the one beside its user's.

    Raises:
        TypeError: This vLLM's schedulers lack something that holding relies on, or this one is not
            vLLM's own, and may rely on its own queue; says what.
    """
    from .connector import KvGraphConnector

    if problems := live_misfits(Part.ADMISSION):
        raise TypeError("; ".join(problems))
    connector = scheduler.connector
    ours = connector if isinstance(connector, KvGraphConnector) else getattr(connector, WATCH, None)
    if ours is None:
        return
    if not type(scheduler).__module__.startswith("vllm."):
        raise TypeError(f"{type(scheduler).__qualname__} is not one of vLLM's own schedulers")
    ours.bind_scheduler(scheduler)
