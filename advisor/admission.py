"""``Admission``: how much new context an engine has room for. While it computes again much of what
it held a moment ago (that share of its prompts is its regret), new context starts only in the room
that live, resident sessions leave."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ..graph.compiled import core
from ..graph.tables.blocks import FIRST_KNOWN
from ..graph.tables.sessions import SessionTable
from ..graph.tables.tables import Tables
from ..graph.types import SessionState
from ..graph.wire.advice import AdmissionAdvice
from .words.waits import OFF

Rows = npt.NDArray[np.intp]
Floats = npt.NDArray[np.float64]

LIVE_S: Final = 600.0  # of silence, and a session is not live: its user turned away; chosen

_FADE_S: Final = 300.0  # over which silence makes a return unlikely (to 1/e); chosen
_OF_A_PAUSE: Final = 2.0  # a tool may take this many times the expected pause; chosen


@dataclass(frozen=True, slots=True)
class Demand:
    """The blocks of one engine's pool that live sessions need."""

    live: int  # sessions that run, or were seen within `LIVE_S` and have not ended
    warm: int  # of these, with half or more of their context in the pool
    blocks: int  # of warm contexts, each times the probability of a return soon
    usual: int  # mean context of a warm session, in blocks; at least 1


def demand(tables: Tables, engine: int, now: float) -> Demand:
    sessions = tables.sessions
    live, reached = _is_live(sessions, engine, now), _reached(tables, engine)
    rows = np.flatnonzero((2 * reached >= sessions.reach[: sessions.size]) & (reached > 0) & live)
    context = sessions.reach[rows]
    wanted = float(context @ _chance(sessions, rows, now))
    usual = round(float(context.mean())) if len(rows) else 1
    return Demand(int(np.count_nonzero(live)), len(rows), round(wanted), max(1, usual))


def _is_live(sessions: SessionTable, engine: int, now: float) -> npt.NDArray[np.bool_]:
    size = sessions.size
    live = sessions.last_seen[:size] > now - LIVE_S
    live |= sessions.running[:size] > 0
    live &= sessions.engine[:size] == engine
    live &= sessions.state[:size] != SessionState.ENDED
    return np.asarray(live)


def _reached(tables: Tables, engine: int) -> npt.NDArray[np.int32]:
    """int32 ``[sessions]``: how deep into each session's context the pool holds blocks of it."""
    # A block that sessions share counts for the last one that walked it, and is not deep.
    blocks, reached = tables.blocks, np.zeros(tables.sessions.size, dtype=np.int32)
    core.reached(blocks, blocks.holding(engine).rows, FIRST_KNOWN, reached)
    return reached


def _chance(sessions: SessionTable, rows: Rows, now: float) -> Floats:
    """float64 ``[n]``: probability of a return soon; 1 while the session runs, or its tool may."""
    seen = sessions.last_seen[rows]
    waiting = sessions.state[rows] == SessionState.WAITING_FOR_TOOL
    pause = np.where(waiting, np.maximum(sessions.expected_return[rows] - seen, 0.0), 0.0)
    overdue = np.maximum(0.0, now - seen - _OF_A_PAUSE * pause)
    chance = np.exp(-overdue / _FADE_S)
    chance[sessions.running[rows] > 0] = 1.0
    return np.asarray(chance)


# All chosen in the closed loop of the replay lab, on other sessions than those of the figures.
_MEMORY: Final = 2.0  # pools' worth of asked blocks over which regret fades by half
_CLOSES: Final = 0.2  # of the asked blocks, computed again
_HIGH: Final = 0.12  # above this the limit falls …
_CALM: Final = 0.06  # … and below this it rises, and what was closed may open
_FALL: Final = 0.15  # of the limit, for a pool's worth of asked blocks
_RISE: Final = 0.05  # of the pool, for as much
_LEAST, _MOST = 0.5, 1.1  # bounds of the limit, in pools
_CALM_POOLS: Final = 3.0  # asked so long with room to spare: opens
_USELESS: Final = 0.8  # of the asked blocks: if so many are computed again although it is closed …
_TRIAL_POOLS: Final = 4.0  # … and so much was asked while requests were held, it opens …
_BARRED_POOLS: Final = 32.0  # … until so much more was asked: twice as much after each such time
_MOST_FAILED: Final = 6  # such times that are counted


@dataclass(slots=True)
class Valve:
    """Limits by feedback how much of one engine's pool live contexts may take."""

    pool: int  # blocks
    limit: float | None = None  # blocks that live contexts may take; None: open
    _asked: float = 0.0  # blocks; fades
    _again: float = 0.0  # of these, computed again
    _roomy: float = 0.0  # blocks asked since room was last short
    _closed: float = 0.0  # blocks asked while it was closed and requests were held
    _barred: float = 0.0  # blocks that must be asked before it may close again
    _failed: int = 0  # times that it opened since it saved nothing
    _seen: tuple[int, int] = (0, 0)

    @property
    def regret(self) -> float:
        """Share of recently asked blocks that were computed again."""
        return self._again / max(self._asked, self.pool)

    @property
    def barred_pools(self) -> int:
        """Pools' worth of blocks that must be asked before it may close again."""
        return math.ceil(max(0.0, self._barred) / self.pool)

    def update(self, asked: int, again: int, demand: Demand, *, holds: bool = True) -> None:
        """Close, open or move the limit, by the blocks of all prompts so far and those computed
        again. While the engine holds no requests (``holds``), a limit is not on trial."""
        new = self._note(asked, again)
        if self.limit is None:
            self._barred -= new
            if self.regret > _CLOSES and self._barred <= 0:
                self.limit, self._roomy = float(min(demand.blocks, self.pool)), 0.0
                self._closed = 0.0
            return
        self._closed += new if holds else 0
        if self._closed > _TRIAL_POOLS * self.pool and self.regret > _USELESS:
            # Contexts are lost whoever waits: pauses are too long, or sessions too many.
            self.limit, self._barred = None, _BARRED_POOLS * self.pool * 2.0**self._failed
            self._failed = min(self._failed + 1, _MOST_FAILED)
            return
        self.limit = self._moved(self.limit, new / self.pool)
        roomy = self.limit - demand.blocks > demand.usual and self.regret < _CALM
        self._roomy = self._roomy + new if roomy else 0.0
        if self._roomy > _CALM_POOLS * self.pool:
            self.limit = None

    def _note(self, asked: int, again: int) -> int:
        """Take in new counts, fade old ones; returns the blocks asked since the last time."""
        if asked < self._seen[0]:
            self._seen = 0, 0  # counted anew: another engine in the place of one that is gone
        new, lost = asked - self._seen[0], again - self._seen[1]
        self._seen = asked, again
        fade = 0.5 ** (new / (_MEMORY * self.pool))
        self._asked, self._again = self._asked * fade + new, self._again * fade + lost
        return new

    def _moved(self, limit: float, pools: float) -> float:
        if self.regret > _HIGH:
            limit *= (1.0 - _FALL) ** pools
        elif self.regret < _CALM:
            limit += _RISE * pools * self.pool
        return min(max(limit, _LEAST * self.pool), _MOST * self.pool)


logger = logging.getLogger(__name__)

_UNUSED_BLOCKS: Final = 1  # of every pool: vLLM keeps one for itself


class Admission:
    """Advises each engine on room. The sidecar and the replay lab run the same object."""

    def __init__(self) -> None:
        self._valves: dict[int, Valve] = {}
        self._epoch = 0

    def advise(self, tables: Tables, engine: int, now: float) -> AdmissionAdvice:
        """Advise one engine, by its residency column; called under the graph's lock."""
        valve = self._valve(engine, tables.pool_blocks.get(engine, 0) - _UNUSED_BLOCKS)
        prompts, wanted = tables.regret.of(engine), demand(tables, engine, now)
        was_open = valve.limit is None
        report = tables.reports[engine].admission
        holds = report is None or report.waiting > 0  # true of an engine that does not report
        valve.update(prompts.asked, prompts.again, wanted, holds=holds)
        self._epoch += 1
        advice = _advice(self._epoch, now, valve, wanted)
        if was_open != (valve.limit is None):
            _say(tables, engine, valve, advice)
        return advice

    def forget_all_but(self, engines: set[int]) -> None:
        self._valves = {engine: self._valves[engine] for engine in self._valves.keys() & engines}

    def _valve(self, engine: int, pool: int) -> Valve:
        valve = self._valves.get(engine)
        if valve is None or valve.pool != max(1, pool):
            valve = self._valves[engine] = Valve(max(1, pool))
        return valve


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
    is_off = tables.reports[engine].admission is None
    logger.info(
        "engine %s computes %d %% of its prompts again: %d sessions are live and %d fit; %s",
        name, round(100 * valve.regret), advice.live_sessions, advice.fitting_sessions,
        OFF if is_off else "while prompts queue, new ones wait for room",
    )  # fmt: skip
