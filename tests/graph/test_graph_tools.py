"""How long tools take, where callers name them: learned, bounded, and used where nobody says."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvgraph.advisor.policies.registry import DEFAULT, new_policy
from kvgraph.graph import snapshot
from kvgraph.graph.tables.returns import A_TENANTS_TOOLS, MOST_TOOLS, ToolBook
from kvgraph.graph.types import NO_ROW
from kvgraph.graph.wire.events import SessionSignal
from turns import Told


class World(Told):
    """Sessions of one block each, that wait for tools."""

    def __init__(self) -> None:
        super().__init__()
        self._keys: dict[tuple[str, str], int] = {}

    def waits(
        self, session: str, tool: str | None, stated: float | None = None, tenant: str = "t"
    ) -> None:
        key = self._keys.setdefault((session, tenant), len(self._keys) + 1)
        said = {"waiting_for_tool": True, "expected_return_s": stated, "tool": tool}
        self.turn(session, key, tenant=tenant, **said)

    def takes(self, tool: str, *seconds: float, tenant: str = "t") -> None:
        """Sessions wait for a tool, and come back after so long."""
        for number, pause in enumerate(seconds):
            self.waits(f"{tool}{number}", tool, tenant=tenant)
            self.now += pause
            self.waits(f"{tool}{number}", None, tenant=tenant)

    def expected(self, session: str, tenant: str = "t") -> float | None:
        seconds: float | None = self.graph.explain_session(session, tenant)["expected_return_in_s"]
        return seconds


@pytest.fixture
def world() -> World:
    return World()


def test_what_a_tool_took_is_expected_of_it(world: World) -> None:
    world.takes("grep", 2.0, 2.0, 2.0)
    world.takes("build", 100.0, 120.0, 110.0)
    world.waits("a", "grep")
    world.waits("b", "build")
    assert world.expected("a") == pytest.approx(2.0, rel=0.01)
    assert world.expected("b") == pytest.approx(110.0, rel=0.05)
    assert world.graph.explain_session("b")["waits_for"] == "build"
    sessions = world.graph.tables.sessions
    due = [sessions.names[row] for row in sessions.soon(3.0, world.now)]
    assert "a" in due
    assert "b" not in due


def test_what_a_caller_states_counts_before_what_was_learned(world: World) -> None:
    world.takes("grep", 2.0, 2.0, 2.0)
    world.waits("a", "grep", stated=60.0)
    assert world.expected("a") == pytest.approx(60.0)


def test_nothing_is_expected_of_a_tool_that_few_waited_for_or_that_takes_now_this_now_that(
    world: World,
) -> None:
    world.takes("new", 5.0, 5.0)
    world.takes("shell", 0.1, 300.0, 1.0, 2000.0, 0.2, 500.0)
    world.takes("grep", 2.0, 2.0, 2.0, tenant="other")
    for tool in ("new", "shell", "unheard", "grep"):
        world.waits(tool, tool)
        assert world.expected(tool) is None, "of grep another tenant knows"


def test_the_default_keeps_who_waits_for_a_quick_tool_longer(world: World) -> None:
    world.graph.policy = new_policy(DEFAULT)
    for _ in range(4):
        world.takes("grep", 3.0)
        world.takes("build", 900.0)
    world.waits("slow", "build")
    world.waits("quick", "grep")
    blocks, named = world.graph.tables.blocks, world.graph.tables.sessions.names
    order = [named[blocks.session[row]] for row in blocks.find(world.graph.rank("e", 99).order)]
    assert order.index("slow") < order.index("quick")


def test_tools_beyond_a_tenants_share_are_one_and_all_are_bounded() -> None:
    book = ToolBook()
    numbers = [book.number(f"tool {n}", 1) for n in range(A_TENANTS_TOOLS + 10)]
    assert len(set(numbers)) == A_TENANTS_TOOLS + 1
    assert len(set(numbers[A_TENANTS_TOOLS:])) == 1
    assert book.name(numbers[-1]) is None
    for tenant in range(2, MOST_TOOLS // 8):
        for n in range(10):
            assert 0 <= book.number(f"tool {n}", tenant) < MOST_TOOLS
    assert len(book) == len(book.names) == MOST_TOOLS
    assert book.expected_s(NO_ROW) is None


def test_no_tenants_many_tools_take_the_place_of_what_is_known(world: World) -> None:
    world.takes("bash", 2.0, 2.0, 2.0, tenant="honest")
    world.waits("waits", "bash", tenant="honest")
    tools = world.graph.tables.sessions.tools
    for tenant in range(1000, 1000 + 2 * MOST_TOOLS // A_TENANTS_TOOLS):
        for n in range(A_TENANTS_TOOLS):
            tools.number(f"tool {n}", tenant)
    assert len(tools) == MOST_TOOLS
    assert world.expected("waits", "honest") == pytest.approx(2.0, rel=0.01)


def test_a_new_tool_has_the_time_to_become_known_among_others() -> None:
    book = ToolBook()
    for tenant in range(MOST_TOOLS):
        for _ in range(4):
            book.note(book.number("known", tenant), 2.0)
    for other in range(40):
        mine = book.number("mine", 9000)
        book.note(mine, 5.0)
        book.number("once", 10_000 + other)
    assert book.expected_s(book.number("mine", 9000)) == pytest.approx(5.0)


def test_nobody_waits_for_a_tool_whose_place_another_took(world: World) -> None:
    tools = world.graph.tables.sessions.tools
    for tenant in range(1000, 1000 + MOST_TOOLS):
        tools.number("only", tenant)
    world.waits("a", "mine")
    assert world.graph.explain_session("a")["waits_for"] == "mine"
    for tenant in range(9000, 9000 + MOST_TOOLS):
        tools.number("only", tenant)
    assert world.graph.explain_session("a")["waits_for"] is None


def test_a_snapshot_knows_what_tools_take(world: World, tmp_path: Path) -> None:
    world.takes("grep", 2.0, 2.0, 2.0)
    snapshot.save(world.graph, tmp_path / "graph.kvg")
    restored = World()
    snapshot.load(restored.graph, tmp_path / "graph.kvg")
    restored.waits("a", "grep")
    assert restored.expected("a") == pytest.approx(2.0, rel=0.01)


def test_a_tool_that_asks_a_person_is_a_tool_no_longer(world: World) -> None:
    """How long the person takes is not how long the tool takes."""
    world.takes("approve", 2, 2, 2)
    world.waits("asks", "approve")
    assert world.expected("asks") == pytest.approx(2)
    world.tell(SessionSignal("asks", "t", waiting_for_tool=False))
    found = world.graph.explain_session("asks", "t")
    assert (found["state"], found["last_stop"]) == ("idle", "end_of_turn")
    assert (found["waits_for"], found["expected_return_in_s"]) == (None, None)
    world.now += 3600
    world.waits("asks", "approve")
    assert world.expected("asks") == pytest.approx(2)
