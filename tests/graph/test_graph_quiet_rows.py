"""Rows of sessions are reused: the longest quiet first, some chosen at a time."""

from __future__ import annotations

import numpy as np
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.tables.sessions import QuietRows, SessionTable
from kvgraph.graph.tables.tables import GraphLimits
from kvgraph.graph.types import NO_ROW
from kvgraph.graph.wire.events import BlocksStored, RequestFinished, RequestStarted

SESSIONS = 1_024  # four are chosen at a time


def turn(number: int) -> list[object]:
    keys = np.arange(1 + 2 * number, 3 + 2 * number, dtype="<u8").tobytes()
    name = f"s{number}"
    started = RequestStarted(name, keys, 32, 0, 16, name, "")
    return [
        started,
        BlocksStored(keys, None, 16),
        RequestFinished(name, keys, 32, 32, "stop", name, ""),
    ]


def test_the_longest_quiet_go_first_and_nobody_who_runs_or_came_back() -> None:
    rows, running = QuietRows(), np.zeros(1_000, dtype=np.int32)
    last_seen = np.arange(1_000, dtype=np.float64)
    running[1] = 1
    row, chosen = rows.take(running, last_seen)
    assert row == 0
    assert chosen.tolist() == [0, 2, 3]
    last_seen[2], running[0] = 5_000.0, 1  # row 2 came back meanwhile
    assert rows.take(running, last_seen)[0] == 3
    last_seen[3] = 5_001.0
    row, chosen = rows.take(running, last_seen)
    assert row == 4
    assert chosen.tolist() == [4, 5, 6]
    running[:] = 1
    assert rows.take(running, last_seen)[0] in range(1_000), "all run: somebody has to go"


def test_no_block_names_a_session_whose_row_another_one_has() -> None:
    now = [0.0]
    graph = KVCacheGraph(limits=GraphLimits(max_sessions=SESSIONS), clock=lambda: now[0])
    for number in range(2 * SESSIONS + 7):
        now[0] += 1.0
        graph.apply("e", turn(number))  # type: ignore[arg-type]
        if number == SESSIONS:
            graph.apply("e", turn(2))  # which was to go next  # type: ignore[arg-type]
    tables = graph.tables
    assert len(tables.sessions) == SESSIONS
    walked = tables.blocks.session[: tables.blocks.size]
    for row in np.unique(walked[walked != NO_ROW]).tolist():
        number = int(tables.sessions.names[row][1:])
        keys = {1 + 2 * number, 2 + 2 * number}
        assert set(tables.blocks.keys[np.flatnonzero(walked == row)].tolist()) <= keys
    graph.check_integrity()


def test_the_sessions_of_some_blocks_are_found_without_a_look_at_the_others() -> None:
    sessions = SessionTable(10)
    rows = [sessions.ensure(f"s{number}", NO_ROW, 0.0) for number in range(5)]
    for row in rows:
        sessions.begin_turn(row, 0, float(row), 10)
        sessions.end_turn(row, NO_ROW, float(row), 10, 20)
    of_blocks = np.array([3, NO_ROW, 1, 3], dtype=np.int32)
    found = sessions.among(of_blocks)
    assert found.tolist() == [1, 3]
    everybody = sessions.credit(9.0, 300.0, np.array(rows, dtype=np.int32))
    assert sessions.credit(9.0, 300.0, found).tolist() == everybody[[1, 3]].tolist()
    assert sessions.among(of_blocks[1:2]).tolist() == []
