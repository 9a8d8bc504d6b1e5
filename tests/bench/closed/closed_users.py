"""Users who play recorded sessions one after another, each turn after the answer and the pause."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Final

from kvgraph.advisor.replay.closed import MAX_PAUSE_S
from kvgraph.advisor.replay.fleet_traffic import MAX_GAP_S, FleetRequest, lay_over_users
from kvgraph.advisor.replay.recordings import Session

from ..recorded.agents_requests import AgentRequest, build_requests

_SPARE: Final = 1.5  # of the recorded time that a run takes, at most: scripts must not run out


@dataclass(frozen=True, slots=True)
class ClosedTurn:
    """One turn of a user's script.

    Attributes:
        first: Whether it begins a session.
        pause_s: Recorded seconds from its answer to the user's next turn.
    """

    request: AgentRequest
    first: bool
    pause_s: float


Script = tuple[ClosedTurn, ...]


def scripts(
    sessions: Sequence[Session], users: int, seed: int, recorded_s: float, vocabulary: int
) -> tuple[Script, ...]:
    """One script a user, for ``recorded_s`` seconds of play; the same arguments give the same.

    Users are somewhere in their first sessions when the run begins, as on any day at noon: were all
    to begin their sessions at once, contexts would be small for most of a short run.

    Raises:
        TrafficError: The vocabulary is too small for this fleet.
    """
    fleet = lay_over_users(sessions, users, _SPARE * recorded_s + 2 * MAX_GAP_S, seed)
    asked = zip(fleet, build_requests(fleet, vocabulary, seed), strict=True)
    by_user = sorted(asked, key=lambda pair: pair[0].user)  # stable: each user's stay in order
    rng = random.Random(f"{seed}/noon")
    return tuple(
        _from_noon([_turn(each, request) for each, request in own], recorded_s, rng)
        for _, own in groupby(by_user, key=lambda pair: pair[0].user)
    )


def _from_noon(turns: Sequence[ClosedTurn], recorded_s: float, rng: random.Random) -> Script:
    """Without a random part of the first session; what is left lasts for the run."""
    first = next((at for at, turn in enumerate(turns) if at and turn.first), len(turns))
    left = list(accumulate(turn.pause_s for turn in reversed(turns)))[::-1]
    starts = [at for at in range(first) if left[at] >= recorded_s] or [0]
    return tuple(turns[rng.choice(starts) :])


def _turn(each: FleetRequest, request: AgentRequest) -> ClosedTurn:
    return ClosedTurn(request, each.index == 0, min(each.pause_s or 0.0, MAX_PAUSE_S))
