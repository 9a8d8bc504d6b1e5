"""A subagent's fork shares its parent's chain, and its parent waits for it."""

from __future__ import annotations

from typing import Any

import pytest
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.wire.events import RequestFinished, RequestStarted
from small_world import pack

HEAD, PARENT = (1, 2), (3, 4, 5, 6, 7, 8)
FORK = (*HEAD, 3, 4, 20, 21, 22)


class Agents:
    """Sessions that nobody names, on one engine."""

    def __init__(self) -> None:
        self.now = 100.0
        self.graph = KVCacheGraph(clock=lambda: self.now)

    def start(self, request: str, *keys: int) -> None:
        self.graph.apply("e", [RequestStarted(request, pack(*keys), 16 * len(keys) + 1, 0, 16)])

    def end(
        self, request: str, *keys: int, tool: bool | None = None, back_s: float | None = None
    ) -> None:
        tokens = 16 * len(keys) + 1
        ended = RequestFinished(
            request,
            pack(*keys),
            tokens,
            tokens + 1,
            "stopped",
            waiting_for_tool=tool,
            expected_return_s=back_s,
        )
        self.graph.apply("e", [ended])

    def said(self, request: str) -> dict[str, Any]:
        return self.graph.explain_session(f"~e/{request}")


@pytest.fixture
def agents() -> Agents:
    """Two sessions that share a head; the first waits for a tool."""
    agents = Agents()
    agents.start("other", *HEAD, 90, 91, 92)
    agents.end("other", *HEAD, 90, 91, 92)
    agents.start("parent", *HEAD, 3)
    agents.end("parent", *HEAD, 3, tool=True)
    agents.now += 5
    agents.start("parent1", *HEAD, *PARENT)
    agents.end("parent1", *HEAD, *PARENT, tool=True)
    return agents


def test_a_fork_is_known_by_what_its_parent_alone_walked(agents: Agents) -> None:
    agents.start("fork", *FORK)
    assert agents.said("fork")["forked_from"] == "~e/parent"
    agents.start("stranger", *HEAD, 30, 31, 32)
    assert agents.said("stranger")["forked_from"] is None


def test_a_parent_is_expected_when_its_fork_is_done(agents: Agents) -> None:
    assert agents.said("parent")["expected_return_in_s"] is None
    agents.now += 5
    agents.start("fork", *FORK)
    agents.now += 300
    agents.end("fork", *FORK, tool=True)
    assert agents.said("parent")["expected_return_in_s"] > 0
    assert agents.said("parent")["state"] == "waiting_for_tool"
    agents.now += 2
    agents.start("fork2", *FORK, 23)
    agents.now += 10
    agents.end("fork2", *FORK, 23, tool=False)
    assert agents.said("parent")["expected_return_in_s"] == 0


def test_what_a_caller_said_of_the_parent_stands(agents: Agents) -> None:
    agents.start("parent2", *HEAD, *PARENT)
    agents.end("parent2", *HEAD, *PARENT, tool=True, back_s=50.0)
    agents.start("fork", *FORK)
    agents.end("fork", *FORK, tool=False)
    assert agents.said("parent")["expected_return_in_s"] == 50


def test_what_a_caller_says_after_us_stands(agents: Agents) -> None:
    agents.start("fork", *FORK)
    assert agents.said("parent")["expected_return_in_s"] == 10
    agents.start("parent2", *HEAD, *PARENT)
    agents.end("parent2", *HEAD, *PARENT, tool=True, back_s=300.0)
    agents.end("fork", *FORK, tool=True)
    agents.now += 3
    agents.start("fork2", *FORK, 23)
    agents.end("fork2", *FORK, 23, tool=False)
    assert agents.said("fork")["forked_from"] == "~e/parent"
    assert agents.said("parent")["expected_return_in_s"] == 297


def test_a_parent_that_went_on_waits_no_more_for_its_fork(agents: Agents) -> None:
    agents.start("fork", *FORK)
    agents.start("parent2", *HEAD, *PARENT)
    agents.end("parent2", *HEAD, *PARENT, tool=True)
    agents.end("fork", *FORK, tool=False)
    assert agents.said("parent")["expected_return_in_s"] is None


def test_a_fork_that_begins_while_its_parent_answers_is_known(agents: Agents) -> None:
    agents.start("parent2", *HEAD, *PARENT)
    agents.start("fork", *HEAD, *PARENT, 20, 21)
    assert agents.said("fork")["forked_from"] == "~e/parent"
    agents.end("parent2", *HEAD, *PARENT, tool=True)
    agents.end("fork", *HEAD, *PARENT, 20, 21, tool=False)
    assert agents.said("parent")["expected_return_in_s"] == 0


@pytest.mark.parametrize("waits", [True, False])
def test_a_stranger_with_the_same_system_prompt_is_no_fork(waits: bool) -> None:
    agents, stranger = Agents(), (*range(1, 6), 100, 101)
    agents.start("first", *range(1, 46))
    if waits:
        agents.end("first", *range(1, 46), tool=True)
    agents.start("stranger", *stranger)
    agents.end("stranger", *stranger, tool=False)
    assert agents.said("stranger")["forked_from"] is None
    assert agents.said("first")["expected_return_in_s"] is None


def test_a_stranger_with_most_of_a_first_prompt_is_no_fork() -> None:
    agents = Agents()
    agents.start("first", 1, 2, 3, 4, 5, 6)
    agents.now += 1
    agents.start("stranger", 1, 2, 3, 4, 5, 20)
    assert agents.said("stranger")["forked_from"] is None


def test_who_reads_an_answer_waits_for_nobody(agents: Agents) -> None:
    agents.start("reader", 50, 51, 52, 53)
    agents.end("reader", 50, 51, 52, 53, tool=False)
    agents.start("branch", 50, 60, 61, 62)
    assert agents.said("branch")["forked_from"] is None
