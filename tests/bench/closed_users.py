"""Users who play recorded sessions one after another, each turn after the answer and the pause."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from ..advisor.replay.fleet import MAX_GAP_S, FleetRequest, lay_over_users
from ..advisor.replay.weka import Session
from .agents_requests import AgentRequest, build_requests

MAX_PAUSE_S: Final = 600.0
"""Recorded pauses are cut to this: who is away longer has stopped working."""

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

    Raises:
        TrafficError: The vocabulary is too small for this fleet.
    """
    fleet = lay_over_users(sessions, users, _SPARE * recorded_s + MAX_GAP_S, seed)
    asked = zip(fleet, build_requests(fleet, vocabulary, seed), strict=True)
    by_user = sorted(asked, key=lambda pair: pair[0].user)  # stable: each user's stay in order
    return tuple(
        tuple(_turn(each, request) for each, request in own)
        for _, own in groupby(by_user, key=lambda pair: pair[0].user)
    )


def _turn(each: FleetRequest, request: AgentRequest) -> ClosedTurn:
    return ClosedTurn(request, each.index == 0, min(each.pause_s or 0.0, MAX_PAUSE_S))
