"""A fleet: recorded sessions laid over users who work in parallel."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, NamedTuple

from ..errors import ReplayError
from .weka import Session, Turn

MAX_GAP_S: Final = 1800.0
"""Pauses inside a session are cut to this: who is away longer is not at work."""


LEAST_S: Final = 1.0
"""That a session takes its user, also where no time of it was recorded: else it has no end."""


@dataclass(frozen=True, slots=True)
class FleetRequest:
    """A turn of a session that a user plays.

    Attributes:
        at: Seconds since the fleet began.
        run: The name of this playing of the session; a session played again has another.
        scope: The run in which its recorded block numbers hold: a subagent's is its parent's.
        index: Which turn of ``session`` it is.
        returns_s: Seconds until the session's next request, cut; None after the last one.
        lap: How often the fleet has begun its sessions anew by then, from 1.
    """

    at: float
    user: int
    run: str
    scope: str
    session: Session
    index: int
    returns_s: float | None
    lap: int = 1

    @property
    def turn(self) -> Turn:
        """What was recorded of it."""
        return self.session.turns[self.index]

    @property
    def next_turn(self) -> Turn | None:
        """The session's turn after it."""
        after = self.index + 1
        return self.session.turns[after] if after < len(self.session.turns) else None

    @property
    def pause_s(self) -> float | None:
        """Seconds from the end of the answer to the session's next request."""
        if self.returns_s is None:
            return None
        return max(0.0, self.returns_s - (self.turn.api_s or 0.0))


class _Run(NamedTuple):
    """One playing of a session."""

    name: str
    scope: str
    session: Session
    lap: int


def lay_over_users(
    sessions: Sequence[Session], users: int, seconds: float, seed: int
) -> list[FleetRequest]:
    """The requests of a fleet in order of arrival; the same seed gives the same fleet.

    Users draw sessions from one shuffled pile, each the next one when the last is over; a pile
    that is used up is shuffled again, and a session played again is another session. Users
    begin within the first ``MAX_GAP_S``.

    Args:
        seconds: The horizon: what would arrive later is left out.

    Raises:
        ReplayError: There is no session or no user.
    """
    if not sessions or users < 1 or seconds <= 0:
        raise ReplayError("a fleet needs at least one session, one user and some time")
    requests: list[FleetRequest] = []
    pile = _pile(sessions, random.Random(f"{seed}/order"))
    starts = random.Random(f"{seed}/starts")
    free = sorted((starts.uniform(0.0, MAX_GAP_S), user) for user in range(users))
    while free[0][0] < seconds:
        at, user = free[0]
        run = next(pile)
        requests += _play(run, user, at)
        heapq.heapreplace(free, (at + _busy_s(run.session), user))
    return sorted((r for r in requests if r.at < seconds), key=lambda r: (r.at, r.run, r.index))


def in_harnesses(sessions: Sequence[Session], count: int, seed: int) -> list[Session]:
    """The same sessions, as if ``count`` harnesses ran them all; the same seed gives the same.

    A harness has the tools and the system prompt of one of them, as long as recorded; sessions are
    dealt out evenly. Each keeps its prompts' lengths: of a head that is longer than its own was it
    has as much as that, and what its own was longer is its own text.

    Raises:
        ReplayError: There are more harnesses than sessions, or none.
    """
    if not 1 <= count <= len(sessions):
        raise ReplayError(f"--harnesses {count}: allowed: 1 to {len(sessions)}, the sessions")
    order = list(sessions)
    random.Random(f"{seed}/harnesses").shuffle(order)
    numbers = {session.name: place % count for place, session in enumerate(order)}
    return [
        _with_head(each, order[numbers[each.name]], f"harness {numbers[each.name] + 1}")
        for each in sessions
    ]


def _with_head(session: Session, pattern: Session, harness: str) -> Session:
    """A session, and those of its subagents that have its head, with as much as fits of another."""
    own = session.tool_tokens + session.system_tokens
    tools = min(pattern.tool_tokens, own)
    return replace(
        session,
        tool_tokens=tools,
        system_tokens=min(pattern.tool_tokens + pattern.system_tokens, own) - tools,
        subagents=tuple(
            _with_head(agent, pattern, harness) if _head(agent) == _head(session) else agent
            for agent in session.subagents
        ),
        harness=harness,
    )


def _head(session: Session) -> tuple[int, int]:
    return session.tool_tokens, session.system_tokens


def _pile(sessions: Sequence[Session], rng: random.Random) -> Iterator[_Run]:
    """Runs of sessions, without end."""
    lap = 0
    while True:
        lap += 1
        order = list(sessions)
        rng.shuffle(order)
        for session in order:
            name = session.name if lap == 1 else f"{session.name}@{lap}"
            yield _Run(name, name, session, lap)


def _play(run: _Run, user: int, start: float) -> Iterator[FleetRequest]:
    """The requests of a session that begins at ``start``, and those of its subagents."""
    name, scope, session, lap = run
    offsets = _offsets(session)
    for index, offset in enumerate(offsets):
        after = offsets[index + 1] - offset if index + 1 < len(offsets) else None
        yield FleetRequest(start + offset, user, name, scope, session, index, after, lap)
    for number, agent in enumerate(session.subagents, 1):
        begins = start + _when(session, offsets, agent)
        yield from _play(_Run(f"{name}.{number}", scope, agent, lap), user, begins)


def _offsets(session: Session) -> list[float]:
    """Seconds from a session's first request to each, its pauses cut."""
    offsets = [0.0]
    for turn, after in pairwise(session.turns):
        offsets.append(offsets[-1] + min(after.at - turn.at, MAX_GAP_S))
    return offsets


def _when(session: Session, offsets: Sequence[float], agent: Session) -> float:
    """Seconds from a session's first request to its subagent's, its pauses cut."""
    turns = enumerate(session.turns)
    before = max((i for i, turn in turns if turn.at <= agent.began), default=0)
    return offsets[before] + min(agent.began - session.turns[before].at, MAX_GAP_S)


def _busy_s(session: Session) -> float:
    """Seconds that a user plays a session; its subagents run beside it."""
    return max(LEAST_S, _offsets(session)[-1] + (session.turns[-1].api_s or 0.0))
