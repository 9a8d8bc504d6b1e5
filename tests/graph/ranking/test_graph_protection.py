"""Whose word on a block counts, and how much of a pool may be protected."""

from __future__ import annotations

import pytest
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.ranking.policy import Rules
from kvgraph.graph.types import Authority, SourceLayer
from kvgraph.graph.wire.events import (
    BlocksStored,
    EngineHello,
    RequestFinished,
    RequestStarted,
    Segment,
    SessionSignal,
)
from wire_keys import pack

SIZE = 16
RULES, IDENTITY, AXIOMS = SourceLayer.RULES, SourceLayer.IDENTITY, SourceLayer.AXIOMS
GENERATION, CONTEXT = SourceLayer.GENERATION, SourceLayer.CONTEXT
TOOLS = SourceLayer.CAPABILITIES


class World:
    def __init__(self, pool: int = 100) -> None:
        self.now = 1000.0
        self.graph = KVCacheGraph(rules=Rules(protected_share=0.5), clock=lambda: self.now)
        self.graph.apply("e", [EngineHello("e", "m", SIZE, pool, "v")])

    def say(
        self,
        tenant: str | None,
        layer: SourceLayer,
        *keys: int,
        session: str = "s",
        authority: Authority = Authority.CALLER,
        importance: float | None = None,
        ended: bool = False,
    ) -> None:
        """A request whose whole prompt is tagged."""
        self.now += 1.0
        packed, tokens = pack(*keys), len(keys) * SIZE
        segment = Segment(int(layer), 0, tokens, importance, None, None, int(authority))
        started = RequestStarted("r", packed, tokens, 0, SIZE, session, tenant, (segment,))
        finished = RequestFinished(
            "r", packed, tokens, tokens, "stop", session, tenant, session_ended=ended
        )
        self.graph.apply("e", [started, BlocksStored(packed, None, SIZE), finished])

    def head(self, session: str, *keys: int, ended: bool = False) -> None:
        """A prompt whose first half are tools and whose second half are rules."""
        self.now += 1.0
        packed, tokens = pack(*keys), len(keys) * SIZE
        segments = (Segment(TOOLS, 0, tokens // 2), Segment(RULES, tokens // 2, tokens))
        started = RequestStarted("r", packed, tokens, 0, SIZE, session, None, segments)
        finished = RequestFinished(
            "r", packed, tokens, tokens, "stop", session, None, session_ended=ended
        )
        self.graph.apply("e", [started, BlocksStored(packed, None, SIZE), finished])

    def layer(self, key: int) -> str:
        return str(self.graph.explain(key)["layer"])

    def protected(self) -> set[int]:
        return set(self.graph.rank("e", 1000).protected.tolist())


@pytest.fixture
def world() -> World:
    return World()


def test_an_operators_word_holds_against_callers(world: World) -> None:
    world.say("a", RULES, 1, authority=Authority.OPERATOR)
    world.say("a", GENERATION, 1)
    assert world.layer(1) == "rules"
    world.say("b", AXIOMS, 1)
    assert world.layer(1) == "rules"
    world.say("a", CONTEXT, 2)
    world.say("b", GENERATION, 2, authority=Authority.OPERATOR)
    assert world.layer(2) == "generation"


def test_a_callers_word_holds_against_what_is_inferred(world: World) -> None:
    world.say("a", RULES, 1)
    written = RequestFinished("x", pack(1, 2), 0, 2 * SIZE, "stop", "t", "b")
    world.graph.apply("e", [written])
    assert (world.layer(1), world.layer(2)) == ("rules", "generation")


def test_only_the_tenant_that_raised_a_shared_block_lowers_it(world: World) -> None:
    world.say("a", RULES, 1)
    world.say("b", GENERATION, 1)
    assert world.layer(1) == "rules"
    world.say("b", IDENTITY, 1)
    world.say("a", GENERATION, 1)
    assert world.layer(1) == "identity", "the most precious word, whoever's it is"
    world.say("b", CONTEXT, 1)
    assert world.layer(1) == "context"


def test_the_word_of_a_session_that_is_over_no_longer_binds(world: World) -> None:
    world.say("a", RULES, 1, session="one", ended=True)
    world.say("b", GENERATION, 1)
    assert world.layer(1) == "generation"


def test_importance_too_is_lowered_by_its_own_tenant_only(world: World) -> None:
    world.say("a", RULES, 1, importance=0.8)
    world.say("b", RULES, 1, importance=0.1)
    assert world.graph.explain(1)["importance"] == pytest.approx(0.8)
    world.say("a", RULES, 1, importance=0.1)
    assert world.graph.explain(1)["importance"] == pytest.approx(0.1)


def test_a_signal_reaches_its_tenants_session_only(world: World) -> None:
    world.say("a", CONTEXT, 1, session="chat-7")
    world.graph.apply("e", [SessionSignal("chat-7", tenant="b", ended=True)])
    world.graph.apply("e", [SessionSignal("chat-7", ended=True)])
    assert world.graph.explain_session("chat-7")["state"] == "idle"
    assert len(world.graph.tables.sessions) == 1
    world.graph.apply("e", [SessionSignal("chat-7", tenant="a", ended=True)])
    assert world.graph.explain_session("chat-7")["state"] == "ended"


def test_no_more_than_its_share_of_a_pool_is_protected(world: World) -> None:
    for number in range(8):
        world.say(None, RULES, *range(100 * number, 100 * number + 10), session=str(number))
    assert len(world.protected()) == 50
    assert world.graph.stats().engines["e"].protected == 80
    stats = world.graph.stats().engines["e"]
    assert stats.over_share == 30
    assert stats.limited == {"inferred": 0, "tenant": 0, "all": 30}
    assert len(world.graph.rank("e", 1000).order) == 30


def test_the_most_precious_keep_their_protection(world: World) -> None:
    world.say(None, RULES, *range(100, 140), session="rules")
    world.say(None, AXIOMS, *range(200, 230), session="axioms")
    world.say(None, RULES, *range(300, 310), session="young")
    kept = world.protected()
    assert kept == {*range(200, 230), *range(300, 310), *range(100, 110)}
    assert world.graph.explain(120)["standing"] == ["protected_layer"]
    assert world.graph.explain(120)["over_share_on"] == ["e"]
    assert world.graph.explain(200)["over_share_on"] == []


def test_what_stands_before_a_protected_block_is_kept_with_it_and_counts_too(world: World) -> None:
    for number in range(4):
        world.head(str(number), *range(100 * number, 100 * number + 20))
    kept = world.protected()
    assert len(kept) <= 50, "half of the pool, tools among them"
    assert kept == {*range(300, 320), *range(200, 220)}, "the third would keep ten tools with it"


def test_one_sessions_branches_count_each_for_itself(world: World) -> None:
    for number in range(9):
        world.say("a", RULES, *range(100 * number, 100 * number + 10), session="one for all")
    assert len(world.protected()) == 25


def test_what_sessions_share_is_counted_once(world: World) -> None:
    world.head("one", *range(20), *range(100, 120))
    world.head("two", *range(20), *range(200, 220))
    assert len(world.protected()) == 50
    assert set(range(20)) < world.protected()


def test_what_only_an_ended_session_used_is_protected_no_longer(world: World) -> None:
    world.head("one", *range(20))
    world.head("two", *range(100, 120))
    world.head("three", *range(100, 120))
    world.graph.apply("e", [SessionSignal(name, ended=True) for name in ("one", "two", "three")])
    assert world.protected() == set(range(100, 120)), "others may come who share it"
    assert world.graph.stats().engines["e"].protected == 10
    world.head("four", *range(20))
    assert set(range(20)) < world.protected()


def test_one_named_tenant_cannot_take_all_of_it(world: World) -> None:
    world.say("greedy", AXIOMS, *range(100, 180), session="g")
    world.say("modest", RULES, *range(200, 210), session="m")
    assert world.protected() == {*range(100, 125), *range(200, 210)}
    assert world.graph.stats().engines["e"].limited == {"inferred": 0, "tenant": 55, "all": 0}


def test_the_shares_are_configuration(world: World) -> None:
    world.graph.configure(Rules(protected_share=0.1, tenant_share=0.05))
    world.say("a", RULES, *range(100, 120))
    world.say(None, RULES, *range(200, 220))
    assert len(world.protected()) == 10


def test_an_engine_that_never_said_how_large_it_is_has_no_bound() -> None:
    world = World()
    world.graph.tables.pool_blocks.clear()
    world.say("a", RULES, *range(100, 200))
    assert len(world.protected()) == 100


# Inferred ---------------------------------------------------------------------------------------


def infer(world: World, *keys: int, sessions: str = "rs") -> None:
    """Requests of these sessions whose whole prompts are inferred to be a system text."""
    for session in sessions:
        world.say(None, RULES, *keys, session=session, authority=Authority.INFERRED)


def test_what_is_inferred_is_protected_unless_that_is_switched_off(world: World) -> None:
    infer(world, 1, 2)
    assert world.layer(1) == "rules"
    assert world.protected() == {1, 2}
    world.graph.configure(Rules(inferred_share=0.0))
    assert world.protected() == set()


def test_it_is_protected_as_long_as_it_is_used_again_and_again(world: World) -> None:
    world.graph.configure(Rules(inferred_share=0.1))
    infer(world, 1, 2, sessions="r")
    assert world.protected() == set(), "it was asked for once only"
    infer(world, 1, 2, sessions="s")
    assert world.protected() == {1, 2}
    world.now += 601
    assert world.protected() == set()


def test_beyond_its_share_nothing_that_is_inferred_is_protected(world: World) -> None:
    world.graph.configure(Rules(inferred_share=0.05))
    infer(world, 1, 2, 3)
    infer(world, 11, 12)
    assert world.protected() == {1, 2, 3, 11, 12}
    infer(world, 21)
    assert world.protected() == set()


def test_what_is_inferred_takes_no_share_from_what_is_stated(world: World) -> None:
    world.graph.configure(Rules(inferred_share=0.02, protected_share=0.03))
    infer(world, 1, 2)
    world.say("a", RULES, 11, 12, 13)
    assert world.protected() == {1, 2, 11, 12, 13}


def test_what_was_stated_stands_over_what_is_inferred(world: World) -> None:
    world.say("a", CONTEXT, 1)
    infer(world, 1)
    assert world.layer(1) == "context"


def test_what_is_inferred_again_leaves_what_was_said_of_its_worth(world: World) -> None:
    infer(world, 1, sessions="r")
    world.graph.tables.blocks.importance[0] = 0.25
    infer(world, 1, sessions="s")
    assert world.graph.explain(1)["importance"] == 0.25
