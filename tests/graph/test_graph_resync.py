"""An engine that greets anew: what was lost on the way must not be believed for ever."""

from __future__ import annotations

from typing import Any

import pytest
from kvgraph.advisor.admission import LIVE_S, demand
from kvgraph.graph.tables.tables import GraphLimits
from kvgraph.graph.types import SessionState
from kvgraph.graph.wire.events import EngineHello
from turns import SIZE, Told, finished, resident, started


class World(Told):
    """One engine, told of by hand."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.greet()

    def greet(self, *sessions: int, engine: str = "e") -> None:
        """Hello, and what these sessions have in the pool."""
        listed = [key for session in sessions for key in keys(session)]
        hello = EngineHello(engine, "m", SIZE, 1000, "v")
        self.tell(hello, resident(*listed), engine=engine)

    def start(self, session: int, request: str, named: bool = True, engine: str = "e") -> None:
        name = f"s{session}" if named else None
        self.tell(started(request, *keys(session), more=1, session=name), engine=engine)

    def end(self, session: int, request: str, over: bool = False) -> None:
        name = f"s{session}"
        end = finished(request, *keys(session), more=1, session=name, session_ended=over)
        self.tell(end)

    def session(self, number: int) -> tuple[SessionState, int]:
        """State and running requests."""
        sessions = self.graph.tables.sessions
        (row,) = sessions.rows_named(f"s{number}")
        return int(sessions.state[row]), int(sessions.running[row])


def keys(session: int) -> range:
    return range(1 + session * 1000, 51 + session * 1000)


@pytest.mark.parametrize("named", [True, False])
def test_sessions_whose_ends_were_lost_do_not_live_for_ever(named: bool) -> None:
    world = World()
    for session in range(10):
        world.start(session, f"r{session}", named)
    world.greet(*range(10))  # the ends were lost on the way
    soon = demand(world.graph.tables, 0, world.now)
    assert (soon.live, soon.warm) == (10, 10), "heard of a moment ago"
    world.now += LIVE_S + 1
    assert demand(world.graph.tables, 0, world.now).live == 0


def test_the_row_of_a_session_whose_end_was_lost_is_used_again() -> None:
    world = World(limits=GraphLimits(max_sessions=2))
    world.start(1, "r1")
    world.greet(1)
    world.now += 1
    world.start(2, "r2")
    world.end(2, "r2")
    world.start(3, "r3")
    sessions = world.graph.tables.sessions
    assert sessions.rows_named("s1") == [], "it was quiet for longest"
    assert sessions.rows_named("s2") != []


def test_a_prompt_goes_on_with_a_session_whose_end_was_lost() -> None:
    world = World()
    world.start(1, "r1", named=False)
    world.greet(1)
    world.start(1, "r2", named=False)
    assert len(world.graph.tables.sessions) == 1


@pytest.mark.parametrize("over", [False, True])
def test_who_still_runs_is_known_again_by_its_end(over: bool) -> None:
    world = World()
    world.start(1, "r1")
    world.greet(1)
    assert world.session(1) == (SessionState.IDLE, 0)
    world.end(1, "r1", over=over)
    assert world.session(1) == (SessionState.ENDED if over else SessionState.IDLE, 0)
    world.start(1, "r2")
    assert world.session(1) == (SessionState.RUNNING, 1)


def test_another_engines_sessions_run_on() -> None:
    world = World()
    world.greet(engine="other")
    world.start(1, "r1")
    world.start(2, "r2", engine="other")
    world.greet(2, engine="other")
    assert world.session(1) == (SessionState.RUNNING, 1)
    assert world.session(2) == (SessionState.IDLE, 0)
