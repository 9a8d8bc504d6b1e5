"""Recorded agents in a closed loop on a real vLLM, below the cliff and past it, held and not.

Each user's next turn comes after the answer and the recorded pause. Past the number of agents whose
contexts fit, each turn pushes out what the next one needs: the cliff. Sessions are ``SHRINK`` times
smaller than recorded and ``1 / PACE`` times faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from kvgraph.advisor.replay.recordings import read_sessions

from ..agents.agents_arms import HOST_LRU, AgentArm, Room
from ..errors import TrafficError
from ..recorded.agents_fleet import SESSIONS
from ..serving.model import ensure_model, vocabulary_size
from ..serving.progress import DemoProgress
from ..serving.workload import BLOCK
from .closed_arms import CLOSED_ARMS, HOLD, HOST_HOLD, LPM, STOCK, ClosedRun, run_closed
from .closed_figures import ClosedResult
from .closed_pass import Clock
from .closed_users import Script, scripts
from .hold_cost import measure_hold

PACE: Final = 1 / 60
"""Seconds that a recorded second takes: prefill here is about as much slower than a GPU's, for
sessions that are smaller by ``SHRINK``."""

POOL: Final = 480
"""Blocks: contexts of about twenty agents."""

UNDER: Final = (0.6, 0.8, 1.0)
OVER: Final = (1.6, 2.4)
"""Numbers of agents, as multiples of the one at which stock is at its best."""

HOSTED: Final = (3.2,)
"""The same where host memory holds as much as the pool: its cliff is twice as far out."""

CLOCK: Final = Clock(PACE, 20.0, 100.0)


@dataclass(frozen=True, slots=True)
class ClosedScale:
    """How much of everything there is.

    Attributes:
        best: Agents at which stock is at its best; None: searched among ``searched``.
        under: Multiples of it that are not past the cliff; 1.0 is its edge.
        over: Those that are.
        hosted: Those that are past it for arms with host memory.
        pairs: Runs of each arm below the cliff, in turns: there the arms differ by less than two
            runs of one arm do.
        repeats: Runs of each arm past the cliff.
    """

    clock: Clock = CLOCK
    best: int | None = None
    searched: tuple[int, ...] = (12, 16, 20, 24, 28)
    under: tuple[float, ...] = UNDER
    over: tuple[float, ...] = OVER
    hosted: tuple[float, ...] = HOSTED
    pairs: int = 3
    repeats: int = 1
    arms: tuple[AgentArm, ...] = CLOSED_ARMS

    def agents(self, best: int, hosted: bool) -> list[int]:
        """Numbers of agents that an arm is to play with, below the cliff first."""
        past = self.hosted if hosted else self.over
        shares = (*(() if hosted else self.under * self.pairs), *(past * self.repeats))
        return [round(share * best) for share in shares]


QUICK_CLOSED: Final = ClosedScale(
    clock=Clock(PACE, 15.0, 45.0), best=20, under=UNDER[-1:], over=OVER[:1],
    pairs=1, arms=(STOCK, LPM, HOLD, HOST_LRU, HOST_HOLD),
)  # fmt: skip


def run_closed_bench(
    progress: bool = True,
    quick: bool = False,
    best: int | None = None,
    pairs: int | None = None,
    arms: Sequence[AgentArm] | None = None,
    sessions: Path = SESSIONS,
    seed: int = 1,
    pace: float | None = None,
    model: str | None = None,
    out: Path = Path(".closed"),
) -> ClosedResult:
    """Run the arms in turn; logs are kept in ``out``.

    Args:
        best: Agents at which stock is at its best; None: searched, or ``quick``'s.
        pairs: Runs of each arm below the cliff; None: those of the scale.
        arms: Stock must be one of them; None: those of ``scale``.
        sessions: A recorded session in the Weka format, or a directory of them.
        pace: Seconds that a recorded second takes; None: ``PACE``, for a machine that has nothing
            else to do. On one that is ten times slower, ten times as many.

    Raises:
        BenchError: A server did not start, or the traffic does not fit.
        ReplayError: The sessions cannot be read.
    """
    scale = QUICK_CLOSED if quick else ClosedScale()
    clock = replace(scale.clock, pace=pace or scale.clock.pace)
    scale = replace(scale, best=best or scale.best, pairs=pairs or scale.pairs, clock=clock)
    arms = scale.arms if arms is None else arms
    if STOCK not in arms:
        raise TrafficError("the arm stock is missing: every figure is relative to it")
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    with DemoProgress(0, shown=progress) as shown:
        bench = _ClosedBench(model or str(ensure_model()), out, sessions, seed, scale, arms, shown)
        bench.play()
        return ClosedResult(out, bench.best, scale, bench.runs, measure_hold(), POOL)


@dataclass
class _ClosedBench:
    """Plays the arms below the cliff and past it."""

    model: str
    out: Path
    sessions: Path
    seed: int
    scale: ClosedScale
    arms: Sequence[AgentArm]
    shown: DemoProgress
    best: int = 0
    runs: list[ClosedRun] = field(default_factory=list)

    def play(self) -> None:
        """Find stock's best number of agents, then play all arms at multiples of it."""
        self.best = self.scale.best or self._search()
        for hosted in (False, True):
            for agents in self.scale.agents(self.best, hosted):
                for arm in self.arms:
                    if arm.hosted is hosted:
                        self.runs.append(self._run(arm, agents))

    def _search(self) -> int:
        tried = [self._run(STOCK, agents) for agents in self.scale.searched]
        return max(tried, key=lambda run: run.passed.turns_per_minute).agents

    def _run(self, arm: AgentArm, agents: int) -> ClosedRun:
        users = self._users(agents)
        longest = max(
            len(turn.request.prompt) + len(turn.request.answer) for own in users for turn in own
        )
        length = -(-longest // BLOCK) * BLOCK
        room = Room(self.model, self.out, POOL, length, POOL)
        return run_closed(arm, room, users, self.scale.clock, self.shown)

    def _users(self, agents: int) -> tuple[Script, ...]:
        clock = self.scale.clock
        recorded_s = clock.end_s / clock.pace
        vocabulary = vocabulary_size(self.model)
        return scripts(read_sessions(self.sessions), agents, self.seed, recorded_s, vocabulary)
