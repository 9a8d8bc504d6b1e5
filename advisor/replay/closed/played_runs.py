"""What users of a closed loop play: recorded sessions, and the pauses between their turns."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from ..errors import ReplayError
from ..recordings.fleet import LEAST_S, FleetRequest
from ..recordings.signals import Signals
from ..recordings.traffic import trace_lines
from ..recordings.weka import Session
from ..traces.duration import ServiceModel
from ..traces.reader import recorded_trace
from ..traces.trace import Trace

MAX_PAUSE_S: Final = 600.0
"""Pauses are cut to this: who is away longer has another task by then."""

_SPARE: Final = 1.5  # times the runs that users of usual runs play in the time; chosen


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Playings of sessions, none of which has begun.

    Attributes:
        trace: The requests of all of them, run by run; when they come is for users to decide.
        first: int64 ``[runs + 1]``: run i's requests are ``first[i]`` to ``first[i + 1]``.
        pause: float64 ``[requests]``: seconds since the answer before; 0 at a run's start.
    """

    trace: Trace
    first: npt.NDArray[np.int64]
    pause: npt.NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.first) - 1


def runs_for(
    sessions: Sequence[Session],
    users: int,
    seconds: float,
    *,
    block_size: int,
    seed: int,
    signals: Signals = Signals.ALL,
) -> Runs:
    """As many runs as ``users`` can play in ``seconds``, and some more.

    Sessions are drawn from one shuffled pile, which is shuffled again when it is used up; one that
    is played again is another session. Subagents are left out: they run while their parent waits.

    Raises:
        ReplayError: There is no session or no user.
    """
    if not sessions or users < 1 or seconds <= 0:
        raise ReplayError("a closed loop needs at least one session, one user and some time")
    usual = sum(map(_least_s, sessions)) / len(sessions)
    count = users + round(_SPARE * users * seconds / usual) + 1
    requests = list(_requests(sessions, count, seed))
    trace = recorded_trace(trace_lines(requests, block_size, signals, seed), f"{users} users")
    assert trace.said is not None
    said = replace(trace.said, seconds=np.full(len(trace), np.nan))
    starts = [number for number, request in enumerate(requests) if not request.index]
    return Runs(
        replace(trace, at=np.zeros(len(trace)), said=said),
        np.append(starts, len(requests)),
        np.array([_pause_s(request.session, request.index) for request in requests]),
    )


def _requests(sessions: Sequence[Session], count: int, seed: int) -> Iterator[FleetRequest]:
    """Run by run; a request's time is its number, so that a trace has them in this order."""
    rng = random.Random(f"{seed}/closed")
    pile: list[Session] = []
    number = lap = 0
    for run in range(count):
        if not pile:
            lap += 1
            pile = list(sessions)
            rng.shuffle(pile)
        session = pile.pop()
        name = f"{session.name}@{run}"
        for index, turn in enumerate(session.turns):
            last = index + 1 == len(session.turns)
            back = None if last else _pause_s(session, index + 1) + (turn.api_s or 0.0)
            yield FleetRequest(float(number), 0, name, name, session, index, back, lap)
            number += 1


def _pause_s(session: Session, index: int) -> float:
    """Seconds from the end of the answer before to this turn, cut; 0 before the first."""
    if not index:
        return 0.0
    before, turn = session.turns[index - 1], session.turns[index]
    return min(max(0.0, turn.at - before.at - (before.api_s or 0.0)), MAX_PAUSE_S)


def _least_s(session: Session) -> float:
    """Seconds that a session takes where nobody waits for anything but answers."""
    service = ServiceModel()
    answers = sum(service.seconds(0, turn.output_tokens) for turn in session.turns)
    pauses = sum(_pause_s(session, index) for index in range(len(session.turns)))
    return max(LEAST_S, answers + pauses)
