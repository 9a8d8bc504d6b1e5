"""Finds the loops that take engines' steps: vLLM shows a connector only its scheduler's parts."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any, Final

from ...reliance.fit import Part
from ...reliance.live_vllm import live_misfits

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCoreProc

logger = logging.getLogger(__name__)

_MARK: Final = "_kvgraph_wrapped"
_NO_LOOP: Final = "kvgraph: an idle engine is not woken for prefetches (%s)"


def follow_loops() -> None:
    """Show every loop that begins from now on to its engine's connector (``bind_loop``).

    A connector calls it while its engine is made: loops begin later, and in the same process.
    """
    if problems := live_misfits(Part.WAKING):
        logger.warning(_NO_LOOP, "; ".join(problems))
        return
    from vllm.v1.engine.core import DPEngineCoreProc, EngineCoreProc

    for kind in (EngineCoreProc, DPEngineCoreProc):
        _follow(kind)


def _follow(kind: type[EngineCoreProc]) -> None:
    original = kind.run_busy_loop
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def run_busy_loop(self: EngineCoreProc, *args: Any, **kwargs: Any) -> Any:
        try:
            bind = getattr(self.scheduler.connector, "bind_loop", None)
            if bind is not None:
                bind(self)
        except Exception as error:
            logger.warning(_NO_LOOP, type(error).__name__)
        return original(self, *args, **kwargs)

    setattr(run_busy_loop, _MARK, True)
    kind.run_busy_loop = run_busy_loop
