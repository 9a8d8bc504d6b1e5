"""Recorded coding agents on a real vLLM: stock, with the graph, with hints, with host memory.

Every arm gets the same requests, one at a time. Recorded sessions are laid over users who work in
parallel; everything is ``SHRINK`` times smaller than recorded, and as fast as this machine allows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from ..errors import TrafficError
from ..recorded.agents_fleet import SESSIONS, USERS, pace_of, recorded_requests
from ..recorded.agents_requests import AgentRequest
from ..recorded.agents_trace import engine_trace
from ..serving.model import ensure_model, vocabulary_size
from ..serving.progress import DemoProgress
from ..serving.workload import BLOCK
from .agents_arms import (
    BUSY,
    DEFAULT,
    HINTS,
    HOST_LRU,
    MARKED,
    QUIET_TIERS,
    STOCK,
    TIERS,
    AgentArm,
    AgentRun,
    Room,
    longest,
    run_arm,
)
from .agents_busy import BusyRun, run_busy
from .agents_figures import AgentsResult
from .agents_lab import BELADY, KEPT_BACK, LRU, LabRun, default_policy, lab_run, pool_for

SHARES: Final = (0.6, 0.4, 0.8)
"""What stock should find in the pools of a run, the first one's figures being the headline."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How much of everything there is.

    Attributes:
        requests: The first so many of the fleet.
        shares: One pool each; see ``SHARES``.
        repeats: Runs of stock on the first pool.
        hosts: Sizes of host memory, as shares of the first pool.
        arms: What is played, unless the caller chooses.
    """

    requests: int = 400
    shares: tuple[float, ...] = SHARES
    repeats: int = 3
    hosts: tuple[float, ...] = (0.5,)  # more of them: --open, above a simulated model
    arms: tuple[AgentArm, ...] = (STOCK, DEFAULT, MARKED, HINTS, HOST_LRU, TIERS, BUSY)

    def cut(self, requests: int | None, shares: tuple[float, ...] | None) -> Scale:
        """The same with so many requests, and with such pools, where they are stated."""
        requests = self.requests if requests is None else requests
        return replace(self, requests=requests, shares=shares or self.shares)


QUICK: Final = Scale(shares=SHARES[:1], repeats=1, arms=(STOCK, DEFAULT, HINTS, HOST_LRU, TIERS))


def _not_kept(result: AgentsResult) -> None:
    pass


def run(
    progress: bool = True,
    scale: Scale | None = None,
    arms: Sequence[AgentArm] | None = None,
    sessions: Path = SESSIONS,
    users: int = USERS,
    seed: int = 1,
    pace: float | None = None,
    model: str | None = None,
    out: Path = Path(".agents"),
    keep: Callable[[AgentsResult], object] = _not_kept,
) -> AgentsResult:
    """Run the arms in turn; logs, recordings and details are kept in ``out``.

    Args:
        arms: Stock must be one of them; None: those of ``scale``.
        sessions: A recorded session in the Weka format, or a directory of them.
        pace: Seconds that a recorded second takes; None: measured, on stock's first run.
        keep: Given what was played so far, after each arm, in case that the next one fails.

    Raises:
        BenchError: A server did not start, a request was refused, or the traffic does not fit.
        ReplayError: The sessions cannot be read.
    """
    scale = scale or Scale()
    arms = scale.arms if arms is None else arms
    if STOCK not in arms:
        raise TrafficError("the arm stock is missing: every figure is relative to it")
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    name = model or str(ensure_model())
    vocabulary = vocabulary_size(name)
    requests = recorded_requests(sessions, users, seed, scale.requests, vocabulary)
    with DemoProgress(len(requests), shown=progress) as shown:
        bench = _Bench(name, out, requests, scale, arms, pace, shown, keep)
        bench.play()
        return bench.result()


class _Bench:
    """Plays the arms on every pool, and the lab behind them."""

    def __init__(
        self,
        model: str,
        out: Path,
        requests: tuple[AgentRequest, ...],
        scale: Scale,
        arms: Sequence[AgentArm],
        pace: float | None,
        shown: DemoProgress,
        keep: Callable[[AgentsResult], object],
    ) -> None:
        self.pace = pace
        self.runs: list[AgentRun] = []
        self.lab: list[LabRun] = []
        self.busy: BusyRun | None = None
        self._model = model
        self._out = out
        self._requests = requests
        self._scale = scale
        self._arms = arms
        self._shown = shown
        self._keep = keep
        self._max_model_len = longest(requests)
        least = self._max_model_len // BLOCK + KEPT_BACK
        scratch = out / "fleet.jsonl.gz"
        self.pools = tuple(pool_for(requests, share, least, scratch) for share in scale.shares)

    def play(self) -> None:
        """Everything, the first pool first: on its first run of stock the pace is measured."""
        for pool in self.pools:
            self._play_stock(pool, self._scale.repeats if pool == self.pools[0] else 1)
            for arm in (DEFAULT, HINTS):
                if arm in self._arms:
                    self._play_advised(arm, pool)
        if MARKED in self._arms:
            self._run(MARKED, self.pools[0])
        for share in self._scale.hosts:
            for arm in (HOST_LRU, QUIET_TIERS, TIERS):
                if arm in self._arms:
                    self._run(arm, self.pools[0], host=round(share * self.pools[0]))
        if BUSY in self._arms:
            assert self.pace is not None
            room = Room(self._model, self._out, self.pools[0], self._max_model_len)
            self.busy = run_busy(room, self._requests, self.pace, self._shown)

    def result(self) -> AgentsResult:
        """What was played so far."""
        return AgentsResult(
            self._out, self._requests, self.pools, self.pace, self.runs, self.lab, self.busy
        )

    def _play_stock(self, pool: int, repeats: int) -> None:
        """What stock evicts depends on no clock, so it need not wait for one."""
        for number in range(repeats):
            done = self._run(STOCK, pool, number=number, timed=False)
        self.pace = self.pace or pace_of(done.passed.result.wall_s, self._requests)
        self._replay(done, LRU, BELADY)

    def _play_advised(self, arm: AgentArm, pool: int) -> None:
        self._replay(self._run(arm, pool), default_policy(arm.telling.hinted))

    def _run(
        self, arm: AgentArm, pool: int, host: int = 0, number: int = 0, timed: bool = True
    ) -> AgentRun:
        room = Room(self._model, self._out, pool, self._max_model_len, host)
        pace = self.pace if timed else None
        done = run_arm(arm, room, self._requests, pace, self._shown, number)
        self.runs.append(done)
        if self.lab:  # what stock finds is told in shares of Belady's, which is replayed behind it
            self._keep(self.result())
        return done

    def _replay(self, done: AgentRun, *policies: str) -> None:
        """The lab on what was just sent, at the times at which it was sent."""
        path = self._out / f"{done.name}.jsonl.gz"
        pace = done.pace or 1.0
        trace = engine_trace(self._requests, done.passed.sent_s, pace, path, done.took_s())
        for policy in policies:
            self._shown.starting(f"lab: {policy}")
            self.lab.append(lab_run(trace, policy, done.pool))
        self._keep(self.result())
