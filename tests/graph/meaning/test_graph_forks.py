"""A subagent's fork shares its parent's chain, and its parent waits for it."""

from __future__ import annotations

from typing import Any

import pytest
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.messages.events import RequestFinished, RequestStarted
from small_world import pack

HEAD, PARENT = (1, 2), (3, 4, 5, 6, 7, 8)


class Agents:
    """Sessions that nobody names, on one engine."""

    def __init__(self) -> None:
        self.now = 100.0
        self.graph = KVCacheGraph(clock=lambda: self.now)

    def start(self, request: str, *keys: int) -> None:
        self.graph.apply("e", [RequestStarted(request, pack(*keys), 16 * len(keys) + 1, 0, 16)])

    def end(self, request: str, *keys: int, tool: bool | None = None) -> None:
        tokens = 16 * len(keys) + 1
        self.graph.apply("e", [RequestFinished(request, pack(*keys), tokens, tokens + 1, "stopped",
                                               waiting_for_tool=tool)])  # fmt: skip

    def said(self, request: str) -> dict[str, Any]:
        return self.graph.explain_session(f"~e/{request}")


@pytest.fixture
def agents() -> Agents:
    """Two sessions that share a head; the first waits for a tool."""
    agents = Agents()
    agents.start("other", *HEAD, 90, 91, 92)
    agents.end("other", *HEAD, 90, 91, 92)
    agents.start("parent", *HEAD, *PARENT)
    agents.end("parent", *HEAD, *PARENT, tool=True)
    return agents


def test_a_fork_is_known_by_what_its_parent_alone_walked(agents: Agents) -> None:
    agents.start("fork", *HEAD, 3, 20, 21, 22)
    assert agents.said("fork")["forked_from"] == "~e/parent"
    agents.start("stranger", *HEAD, 30, 31, 32)
    assert agents.said("stranger")["forked_from"] is None


def test_a_parent_is_expected_when_its_fork_is_done(agents: Agents) -> None:
    assert agents.said("parent")["expected_return_in_s"] is None
    agents.now += 5
    agents.start("fork", *HEAD, 3, 20, 21, 22)
    agents.now += 300
    agents.end("fork", *HEAD, 3, 20, 21, 22, tool=True)
    assert agents.said("parent")["expected_return_in_s"] > 0
    assert agents.said("parent")["state"] == "waiting_for_tool"
    agents.now += 2
    agents.start("fork2", *HEAD, 3, 20, 21, 22, 23)
    agents.now += 10
    agents.end("fork2", *HEAD, 3, 20, 21, 22, 23, tool=False)
    assert agents.said("parent")["expected_return_in_s"] == 0


def test_what_a_caller_said_of_the_parent_stands(agents: Agents) -> None:
    tokens = 16 * 8 + 1
    agents.start("parent2", *HEAD, *PARENT, 9)
    agents.graph.apply("e", [RequestFinished("parent2", pack(*HEAD, *PARENT, 9), tokens, tokens,
                                             "stopped", waiting_for_tool=True,
                                             expected_return_s=50.0)])  # fmt: skip
    agents.start("fork", *HEAD, 3, 20, 21, 22)
    agents.end("fork", *HEAD, 3, 20, 21, 22, tool=False)
    assert agents.said("parent")["expected_return_in_s"] == 50


def test_who_reads_an_answer_waits_for_nobody(agents: Agents) -> None:
    agents.start("reader", 50, 51, 52, 53)
    agents.end("reader", 50, 51, 52, 53, tool=False)
    agents.start("branch", 50, 60, 61, 62)
    assert agents.said("branch")["forked_from"] is None
