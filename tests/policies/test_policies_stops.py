"""Why a session's last answer ended: told, read off the answer, or seen at its length."""

from __future__ import annotations

import numpy as np
import pytest
from kvgraph.advisor.policies.waits import FEATURES, features
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.types import NO_ROW, SessionState, StopReason
from kvgraph.graph.wire.events import CUT_AT_A_LENGTH, RequestFinished, RequestStarted


@pytest.mark.parametrize(
    ("reason", "waiting", "stop", "state"),
    [
        ("finished_stopped", True, StopReason.TOOL_CALL, SessionState.WAITING_FOR_TOOL),
        ("finished_stopped", False, StopReason.END_OF_TURN, SessionState.IDLE),
        ("finished_stopped", None, StopReason.UNKNOWN, SessionState.IDLE),
        ("finished_aborted", None, StopReason.UNKNOWN, SessionState.IDLE),
        (CUT_AT_A_LENGTH, None, StopReason.TRUNCATED, SessionState.IDLE),
        (CUT_AT_A_LENGTH, True, StopReason.TOOL_CALL, SessionState.WAITING_FOR_TOOL),
        (CUT_AT_A_LENGTH, False, StopReason.END_OF_TURN, SessionState.IDLE),
    ],
)
def test_what_is_said_stands_over_what_a_length_shows(
    reason: str, waiting: bool | None, stop: StopReason, state: int
) -> None:
    graph = KVCacheGraph(clock=lambda: 1000.0)
    end = RequestFinished("r", b"", 8, 16, reason, "s", waiting_for_tool=waiting)
    graph.apply("e", [RequestStarted("r", b"", 8, 0, 16, "s"), end])
    sessions = graph.tables.sessions
    row = sessions.find("s", NO_ROW)
    assert sessions.stop[row] == stop
    assert sessions.state[row] == state


def test_to_the_policy_a_cut_answer_is_one_of_which_nothing_is_said() -> None:
    graph = KVCacheGraph(clock=lambda: 1000.0)
    for name, reason in (("cut", CUT_AT_A_LENGTH), ("silent", "finished_stopped")):
        end = RequestFinished(name, b"", 8, 16, reason, name)
        graph.apply("e", [RequestStarted(name, b"", 8, 0, 16, name), end])
    cut, silent = features(graph.tables.sessions, np.array([0, 1]))
    np.testing.assert_array_equal(cut, silent)
    assert np.isnan(cut[FEATURES.index("stop")])
