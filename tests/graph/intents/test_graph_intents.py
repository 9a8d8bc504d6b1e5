"""Intents: what is wanted of blocks is done within bounds, and every one is answered."""

from __future__ import annotations

import pytest
from kvgraph.graph.errors import GraphError
from kvgraph.graph.intents import (
    Intent,
    IntentAnswer,
    IntentKind,
    Target,
    Verdict,
    target_rows,
)
from kvgraph.graph.ranking.policy import Rules
from kvgraph.graph.types import NO_ROW, SessionState, SourceLayer
from kvgraph.graph.wire.events import (
    EngineHello,
    Segment,
    SessionSignal,
)
from turns import SIZE, Told, dropped, removed, spilled

POOL = 40


class World(Told):
    """One engine of ``POOL`` blocks; leases are a quarter of it, and an eighth for a tenant."""

    def __init__(self) -> None:
        super().__init__(EngineHello("e", "", SIZE, POOL, "v"), rules=Rules(protected_share=0.5))

    def want(self, kind: IntentKind, target: Target, **fields: float) -> IntentAnswer:
        return self.graph.intents.apply(Intent(kind, target, **fields))


@pytest.fixture
def world() -> World:
    return World()


def two_sessions(world: World) -> None:
    world.turn("a", 1, 2, 3)
    world.now += 1
    world.turn("b", 4, 5, 6)


def test_a_lease_keeps_blocks_until_it_ends(world: World) -> None:
    two_sessions(world)
    assert world.order()[0] == 3, "the older session's tail goes first"
    answer = world.want(IntentKind.PIN, Target(session="a"), seconds=60.0)
    assert (answer.verdict, answer.blocks, answer.seconds) == (Verdict.ACCEPTED, 3, 60.0)
    assert world.order()[:3] == [6, 5, 4]
    world.now += 61
    assert world.order()[0] == 3


def test_leases_are_bounded_in_share_and_in_time(world: World) -> None:
    for number in range(4):
        world.turn(f"s{number}", *range(100 * number, 100 * number + 6))
    first = world.want(IntentKind.PIN, Target(session="s0"), seconds=1e6)
    assert (first.verdict, first.blocks, first.seconds) == (Verdict.CLIPPED, 6, 900.0)
    second = world.want(IntentKind.PIN, Target(session="s1"), seconds=5.0)
    assert (second.verdict, second.blocks, second.asked) == (Verdict.CLIPPED, 4, 6)
    third = world.want(IntentKind.PIN, Target(session="s2"), seconds=5.0)
    assert third.verdict is Verdict.REJECTED
    again = world.want(IntentKind.PIN, Target(session="s1"), seconds=5.0)
    assert again.blocks == 4, "a lease that is renewed takes no second share"
    world.now += 10
    assert world.want(IntentKind.PIN, Target(session="s2"), seconds=5.0).blocks == 4


def test_a_tenant_has_a_smaller_share_and_no_word_on_others(world: World) -> None:
    world.turn("s", *range(10), tenant="acme")
    world.turn("s", *range(50, 60), tenant="evil")
    world.turn("s", *range(70, 80))
    mine = world.want(IntentKind.PIN, Target(session="s", tenant="acme"))
    assert (mine.verdict, mine.blocks) == (Verdict.CLIPPED, POOL // 8)
    for kind in IntentKind:
        for target in (Target(block=55), Target(block=55, tenant="acme")):
            assert world.want(kind, target).verdict is Verdict.MISSING
    assert world.want(IntentKind.PIN, Target(session="s", tenant="nobody")).blocks == 0
    assert len(target_rows(world.graph.tables, Target(session="s", tenant="evil"))) == 10


def test_a_block_means_its_chain_and_names_mean_their_segments(world: World) -> None:
    named = Segment(int(SourceLayer.TOOL_RESULT), SIZE, 3 * SIZE, None, "tool:search#3", "m-17")
    world.turn("a", 1, 2, 3, 4, segments=(named,))
    tables = world.graph.tables
    keys = tables.blocks.keys[target_rows(tables, Target(block=3))]
    assert keys.tolist() == [1, 2, 3]
    for target in (Target(identity="tool:search#3"), Target(memory_id="m-17")):
        assert tables.blocks.keys[target_rows(tables, target)].tolist() == [2, 3]
    one = target_rows(tables, Target(identity="tool:search#3#1"))  # as `explain` writes it
    assert tables.blocks.keys[one].tolist() == [3]
    for unknown in ("tool:search#4", "tool:search#3#9", "tool:search#3#x", "#0"):
        assert not len(target_rows(tables, Target(identity=unknown)))
    for wrong in (Target(), Target(block=1, session="a")):
        with pytest.raises(GraphError, match="one of"):
            target_rows(tables, wrong)
        assert world.want(IntentKind.PIN, wrong).verdict is Verdict.REJECTED


def test_what_is_demoted_goes_first_until_it_is_walked(world: World) -> None:
    two_sessions(world)
    world.want(IntentKind.PIN, Target(session="b"))
    assert world.want(IntentKind.DEMOTE, Target(session="b")).verdict is Verdict.ACCEPTED
    assert world.order()[:3] == [6, 5, 4]
    world.turn("b", 4, 5, 6)
    assert world.order()[0] == 3


def test_what_is_shared_or_protected_is_not_demoted(world: World) -> None:
    rules = Segment(int(SourceLayer.RULES), 0, SIZE)
    world.turn("a", 1, 2, 3, segments=(rules,))
    world.turn("b", 1, 2, 9, segments=(rules,))
    answer = world.want(IntentKind.DEMOTE, Target(session="a"))
    assert (answer.verdict, answer.blocks, answer.asked) == (Verdict.CLIPPED, 1, 3)
    assert world.want(IntentKind.DEMOTE, Target(block=1)).verdict is Verdict.REJECTED


def test_shared_blocks_outlive_their_session(world: World) -> None:
    world.turn("a", 1, 2)
    world.now += 1
    world.turn("b", 3, 4)
    world.want(IntentKind.SHARE, Target(session="b"))
    for session in "ab":
        world.graph.intents.signal(SessionSignal(session, ended=True))
    assert world.order()[:2] == [2, 1]


def test_value_is_what_was_said(world: World) -> None:
    world.turn("a", 1, 2)
    answer = world.want(IntentKind.RETAIN, Target(session="a"), importance=0.9)
    assert answer.verdict is Verdict.ACCEPTED
    rows = target_rows(world.graph.tables, Target(session="a"))
    assert world.graph.tables.blocks.importance[rows] == pytest.approx(0.9)


def test_a_copy_that_is_wanted_is_ordered_back(world: World) -> None:
    world.turn("a", 1, 2, 3)
    assert world.want(IntentKind.PREFETCH, Target(session="a")).verdict is Verdict.ACCEPTED
    world.tell(spilled(1, 2), removed(1, 2, 3))
    assert world.graph.prefetch_order("e", 10).tolist() == []
    answer = world.want(IntentKind.PREFETCH, Target(session="a"), seconds=30.0)
    assert (answer.verdict, answer.blocks, answer.asked) == (Verdict.DEFERRED, 2, 3)
    assert world.graph.prefetch_order("e", 10).tolist() == [1, 2]
    assert world.want(IntentKind.PIN, Target(session="a")).verdict is Verdict.MISSING
    world.now += 31
    assert world.graph.prefetch_order("e", 10).tolist() == []
    world.tell(dropped(1, 2))
    assert world.want(IntentKind.PREFETCH, Target(session="a")).verdict is Verdict.MISSING


def test_a_signal_is_a_sessions(world: World) -> None:
    world.turn("a", 1)
    said = SessionSignal("a", waiting_for_tool=True, expected_return_s=5.0, tool="bash")
    assert world.graph.intents.signal(said).verdict is Verdict.ACCEPTED
    stranger = SessionSignal("a", "acme", waiting_for_tool=True)
    assert world.graph.intents.signal(stranger).verdict is Verdict.MISSING
    sessions = world.graph.tables.sessions
    row = sessions.find("a", NO_ROW)
    assert sessions.state[row] == SessionState.WAITING_FOR_TOOL
    assert sessions.expected_return[row] == world.now + 5.0
