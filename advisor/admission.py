"""``Admission``: how much new context an engine has room for. While an engine computes much again
that its pool held a short time ago (that share of its prompts is its regret), new context starts
only in the room that live, resident sessions leave.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ..graph.compiled import core
from ..graph.tables.blocks import FIRST_KNOWN
from ..graph.tables.sessions import SessionTable
from ..graph.tables.tables import Tables
from ..graph.tables.walks import Prompts
from ..graph.types import SessionState
from ..graph.wire.advice import AdmissionAdvice
from .words.waits import OFF

Rows = npt.NDArray[np.intp]
Floats = npt.NDArray[np.float64]

LIVE_S: Final = 600.0  # idle seconds after which a session is no longer live; chosen

_FADE_S: Final = 300.0  # idle seconds after which a return is unlikely (1/e); chosen
_OF_A_PAUSE: Final = 2.0  # a tool may take this many times the expected pause; chosen


@dataclass(frozen=True, slots=True)
class Demand:
    """The blocks of one engine's pool that live sessions need."""

    live: int  # sessions that run, or were seen within `LIVE_S` and have not ended
    warm: int  # of these, with half or more of their context in the pool
    blocks: int  # blocks of warm contexts, weighted by the probability of a return soon
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


# Chosen in the closed loop of the replay lab, on other sessions than those of the figures; the
# changes of the limit, with recorded agents on a real engine.
_MEMORY: Final = 2.0  # pools' worth of requested blocks after which regret has halved
_CLOSES: Final = 0.2  # closes above this share of requested blocks computed again
_CALM: Final = 0.06  # below this share it may open again
_HIGH: Final = 0.25  # share of computed blocks computed before: above this the limit falls
_LOW: Final = 0.1  # below this it rises
_FALL: Final = 0.15  # share of the limit, per pool's worth of requested blocks
_RISE: Final = 0.05  # share of the pool, likewise
_LEAST, _MOST = 0.5, 1.1  # bounds of the limit, in pools
_CALM_POOLS: Final = 3.0  # opens after this many pools' worth of requests with room to spare
_USELESS: Final = 0.8  # if a larger share of requested blocks is computed again under a limit
_FEW: Final = 0.1  # share of a pool: waste is measured over at least as many computed blocks
_TRIAL_POOLS: Final = 4.0  # for this many pools of prompts under a limit, it is lifted
_BARRED_POOLS: Final = 32.0  # for this many pools of prompts, doubled after each failure
_MOST_FAILED: Final = 6  # failures that are counted


@dataclass(slots=True)
class Valve:
    """Limits how much of one engine's pool live contexts may take, by feedback."""

    pool: int  # blocks
    limit: float | None = None  # blocks that live contexts may take; None: open
    _asked: float = 0.0  # blocks requested; fades
    _computed: float = 0.0  # of these, blocks computed
    _again: float = 0.0  # of these, blocks computed before
    _roomy: float = 0.0  # blocks requested since room was last short
    _closed: float = 0.0  # blocks requested while it was closed and requests were held
    _barred: float = 0.0  # blocks to be requested before it may close again
    _failed: int = 0  # times in a row that it opened because it saved nothing
    _seen: tuple[int, int, int] = (0, 0, 0)

    @property
    def regret(self) -> float:
        """Share of recently requested blocks that were computed again."""
        return self._again / max(self._asked, self.pool)

    @property
    def wasted(self) -> float:
        """Share of recently computed blocks that had been computed before.

        Most of what agents request is found, so a small regret may be most of what is computed.
        """
        return self._again / max(self._computed, _FEW * self.pool)

    @property
    def barred_pools(self) -> int:
        """Pools' worth of blocks that must be requested before it may close again."""
        return math.ceil(max(0.0, self._barred) / self.pool)

    def update(
        self, prompts: Prompts, demand: Demand, *,
        waits: bool | None = None, queued: int = 0, again: int = 0,
    ) -> None:  # fmt: skip
        """Close, open or move the limit. It is on trial only while a request ``waits`` for room
        (None: unknown). ``queued`` are the blocks of prompts in the engine's queue, of which
        ``again`` will be computed again.
        """
        new = self._note(prompts)
        if self.limit is None:
            self._barred -= new
            if self._closes(queued, again) and self._barred <= 0:
                if self._failed and -self._barred > self._bar(self._failed - 1):
                    self._failed = 0  # nothing was lost for as long as it was barred
                self.limit, self._roomy = float(min(demand.blocks, self.pool)), 0.0
                self._closed = 0.0
            return
        self._closed += new if waits is not False else 0
        if self._closed > _TRIAL_POOLS * self.pool and self.regret > _USELESS:
            # Holding requests saves nothing: pauses are too long, or sessions too many.
            self.limit, self._barred = None, self._bar(self._failed)
            self._failed = min(self._failed + 1, _MOST_FAILED)
            return
        self.limit = self._moved(self.limit, new / self.pool)
        roomy = self.limit - demand.blocks > demand.usual and self.regret < _CALM
        self._roomy = self._roomy + new if roomy and not waits else 0.0
        if self._roomy > _CALM_POOLS * self.pool:
            self.limit, self._failed = None, 0  # it was of use

    def _bar(self, failed: int) -> float:
        """Blocks to be asked before it may close again after failing so often before."""
        return _BARRED_POOLS * self.pool * 2.0**failed

    def _closes(self, queued: int, again: int) -> bool:
        """Whether regret is high, or will be when what is queued now has been computed."""
        if self.regret <= _CALM:
            return False  # nothing that was computed confirms it yet
        return self._again + again > _CLOSES * max(self._asked + queued, self.pool)

    def _note(self, prompts: Prompts) -> int:
        """Take in new counts, fade old ones; returns the blocks asked since the last time."""
        if prompts.asked < self._seen[0]:
            self._seen = 0, 0, 0  # counted anew: another engine in the place of one that is gone
        counts = prompts.asked, prompts.computed, prompts.again
        new, computed, again = (now - seen for now, seen in zip(counts, self._seen, strict=True))
        self._seen = counts
        fade = 0.5 ** (new / (_MEMORY * self.pool))
        self._asked, self._again = self._asked * fade + new, self._again * fade + again
        self._computed = self._computed * fade + computed
        return new

    def _moved(self, limit: float, pools: float) -> float:
        if self.wasted > _HIGH:
            limit *= (1.0 - _FALL) ** pools
        elif self.wasted < _LOW:
            limit += _RISE * pools * self.pool
        return min(max(limit, _LEAST * self.pool), _MOST * self.pool)


logger = logging.getLogger(__name__)

# Seconds for which an unchanged graph is not evaluated again while there is room for all: time
# alone makes returns less likely, and no request waits for that. Chosen.
_LASTS_S: Final = 5.0


class _Known(NamedTuple):
    """What an engine's pool was needed for, as of a version of the graph."""

    version: int
    at: float
    demand: Demand


class Admission:
    """Advises each engine on room. The sidecar and the replay lab run the same object."""

    def __init__(self) -> None:
        self._valves: dict[int, Valve] = {}
        self._known: dict[int, _Known] = {}
        self._epoch = 0

    def advise(
        self, tables: Tables, engine: int, now: float, version: int | None = None
    ) -> AdmissionAdvice:
        """Advise one engine, by its residency column; called under the graph's lock. ``version``
        rises with each change of the graph; None: changes are not counted.
        """
        valve = self._valve(engine, tables.usable_blocks(engine))
        was_open = valve.limit is None
        prompts, wanted = tables.regret.of(engine), self._known_demand(engine, now, version)
        if wanted is None or not was_open:
            wanted = demand(tables, engine, now)
            if version is not None:
                self._known[engine] = _Known(version, now, wanted)
        report = tables.reports[engine].admission
        if report is None:
            valve.update(prompts, wanted)
        else:
            queued, again = report.queued_blocks, report.queued_again
            valve.update(prompts, wanted, waits=report.waiting > 0, queued=queued, again=again)
        self._epoch += 1
        advice = _advice(self._epoch, now, valve, wanted)
        if was_open != (valve.limit is None):
            _say(tables, engine, valve, advice)
        return advice

    def forget_all_but(self, engines: set[int]) -> None:
        self._valves = {engine: self._valves[engine] for engine in self._valves.keys() & engines}
        self._known = {engine: self._known[engine] for engine in self._known.keys() & engines}

    def _known_demand(self, engine: int, now: float, version: int | None) -> Demand | None:
        """What the engine's pool is needed for, if nothing changed since somebody looked lately."""
        known = self._known.get(engine)
        if known is None or known.version != version or now - known.at >= _LASTS_S:
            return None
        return known.demand

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
        epoch, now, room, wanted.live, fits, again=valve.regret, wasted=valve.wasted,
        lifted_pools=valve.barred_pools,
    )  # fmt: skip


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
