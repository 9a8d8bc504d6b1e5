"""A fleet of recorded agents for a bench: which sessions, and how fast they are played."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvgraph.advisor.replay.fleet_traffic import lay_over_users
from kvgraph.advisor.replay.recordings import read_sessions

from .agents_requests import AgentRequest, build_requests

SESSIONS: Final = Path(__file__).parents[1] / "sessions"
"""Recorded sessions that ship with the bench."""

USERS: Final = 40

LOAD: Final = 0.3
"""Share of the time in which stock would be busy by the fleet's clock. Chosen so that requests are
sent when they are due and pauses keep their meaning: users' turns come in bursts, and at 0.6 one
request in twenty was sent 13 s late, which is two recorded minutes; at 0.3 it is 1 s, five recorded
ones."""

HORIZON_S: Final = 6 * 3600.0
"""Recorded seconds of a fleet, of which the first requests are played."""


def recorded_requests(
    sessions: Path, users: int, seed: int, count: int, vocabulary: int
) -> tuple[AgentRequest, ...]:
    """The first ``count`` requests of a fleet, for a model of ``vocabulary`` tokens.

    Raises:
        TraceError: A session cannot be read.
        TrafficError: The vocabulary is too small for this fleet.
    """
    fleet = lay_over_users(read_sessions(sessions), users, HORIZON_S, seed)
    return build_requests(fleet[:count], vocabulary, seed)


def pace_of(wall_s: float, requests: Sequence[AgentRequest]) -> float:
    """Seconds that a recorded second should take, if all took ``wall_s`` one after the other."""
    return wall_s / (LOAD * (requests[-1].at - requests[0].at))
