"""``Admission``: how much new context an engine has room for, while it thrashes.

An engine whose live contexts do not fit computes again what it held a moment ago; that share of
the prompts is its regret. While it is low, everything may start. While it is high, new context may
start only in the room that live, resident sessions leave.
"""

from __future__ import annotations

import logging
from typing import Final

from ...graph.messages.advice import AdmissionAdvice
from ...graph.tables.tables import Tables
from .demand import Demand, demand
from .valve import Valve
from .wording import OFF

logger = logging.getLogger(__name__)

_UNUSED_BLOCKS: Final = 1  # of every pool: vLLM keeps one for itself


class Admission:
    """Advises each engine on room; the object that the sidecar and the replay lab run."""

    def __init__(self) -> None:
        self._valves: dict[int, Valve] = {}
        self._epoch = 0

    def advise(self, tables: Tables, engine: int, now: float) -> AdmissionAdvice:
        """Advise one engine, by its residency column; called under the graph's lock."""
        valve = self._valve(engine, tables.pool_blocks.get(engine, 0) - _UNUSED_BLOCKS)
        prompts, wanted = tables.regret.of(engine), demand(tables, engine, now)
        was_open = valve.limit is None
        valve.update(prompts.asked, prompts.again, wanted, holds=_holds(tables, engine))
        self._epoch += 1
        advice = _advice(self._epoch, now, valve, wanted)
        if was_open != (valve.limit is None):
            _say(tables, engine, valve, advice)
        return advice

    def forget_all_but(self, engines: set[int]) -> None:
        """Forget every engine but ``engines``."""
        self._valves = {engine: self._valves[engine] for engine in self._valves.keys() & engines}

    def _valve(self, engine: int, pool: int) -> Valve:
        valve = self._valves.get(engine)
        if valve is None or valve.pool != max(1, pool):
            valve = self._valves[engine] = Valve(max(1, pool))
        return valve


def _holds(tables: Tables, engine: int) -> bool:
    """Whether requests waited there when it last reported; yes where it does not report."""
    report = tables.words[engine].admission
    return report is None or report.waiting > 0


def _advice(epoch: int, now: float, valve: Valve, wanted: Demand) -> AdmissionAdvice:
    left = (valve.pool if valve.limit is None else int(valve.limit)) - wanted.blocks
    fits = wanted.warm + max(0, left) // wanted.usual
    room = None if valve.limit is None else max(0, left)
    return AdmissionAdvice(
        epoch, now, room, wanted.live, fits, again=valve.regret, lifted_pools=valve.barred_pools
    )


def _say(tables: Tables, engine: int, valve: Valve, advice: AdmissionAdvice) -> None:
    name = tables.name_of(engine) or "?"
    if valve.limit is None and valve.barred_pools:
        logger.warning(
            "engine %s computes %d %% of its prompts again although it was told to let new "
            "sessions wait: that saves nothing, so it need not for the next %d pools' worth of "
            "prompts",
            name, round(100 * valve.regret), valve.barred_pools,
        )  # fmt: skip
        return
    if valve.limit is None:
        logger.info("engine %s: all sessions have room again: nobody needs to wait", name)
        return
    is_off = tables.words[engine].admission is None
    logger.info(
        "engine %s computes %d %% of its prompts again: %d sessions are live and %d fit; %s",
        name, round(100 * valve.regret), advice.live_sessions, advice.fitting_sessions,
        OFF if is_off else "while prompts queue, new ones wait for room",
    )  # fmt: skip
