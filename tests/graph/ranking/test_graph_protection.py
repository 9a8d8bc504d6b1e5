"""Whose word on a block counts, and how much of a pool may be protected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from kvgraph.graph.errors import GraphError
from kvgraph.graph.intents import Intent, IntentKind, Target
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.ranking.order import resident_scores
from kvgraph.graph.ranking.policy import Rules, Scores, Terms, View
from kvgraph.graph.ranking.rules import RULES as LAID
from kvgraph.graph.tables.blocks import Selection
from kvgraph.graph.types import Authority, BlockFlag, SessionState, SourceLayer, Tier
from kvgraph.graph.wire.events import (
    BlocksResident,
    EngineHello,
    RequestFinished,
    Segment,
    SessionSignal,
)
from turns import SIZE, Told, turn_events
from wire_keys import pack

RULES, IDENTITY, AXIOMS = SourceLayer.RULES, SourceLayer.IDENTITY, SourceLayer.AXIOMS
GENERATION, CONTEXT = SourceLayer.GENERATION, SourceLayer.CONTEXT
TOOLS = SourceLayer.CAPABILITIES


class World(Told):
    """One engine with a pool of a hundred blocks, of which half may be protected."""

    def __init__(self) -> None:
        super().__init__(EngineHello("e", "m", SIZE, 100, "v"), rules=Rules(protected_share=0.5))

    def ask(self, session: str, *keys: int, **said: Any) -> None:
        self.now += 1.0
        self.turn(session, *keys, request="r", **said)

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
        whole = Segment(int(layer), 0, len(keys) * SIZE, importance, None, None, int(authority))
        self.ask(session, *keys, tenant=tenant, segments=(whole,), session_ended=ended)

    def head(self, session: str, *keys: int) -> None:
        """A prompt whose first half are tools and whose second half are rules."""
        half, whole = len(keys) * SIZE // 2, len(keys) * SIZE
        self.ask(session, *keys, segments=(Segment(TOOLS, 0, half), Segment(RULES, half, whole)))

    def layer(self, key: int) -> str:
        return str(self.graph.explain(key)["layer"])

    def protected(self) -> set[int]:
        return set(self.graph.rank("e", 1000).protected.tolist())


@pytest.fixture
def world() -> World:
    return World()


OPERATOR = {"authority": Authority.OPERATOR}
WORDS: dict[str, list[tuple[str, SourceLayer, dict[str, Any], str]]] = {
    "an operator's word holds against callers": [
        ("a", RULES, OPERATOR, "rules"), ("a", GENERATION, {}, "rules"), ("b", AXIOMS, {}, "rules"),
    ],
    "an operator's word holds against what was said": [
        ("a", CONTEXT, {}, "context"), ("b", GENERATION, OPERATOR, "generation"),
    ],
    "only the tenant that raised a shared block lowers it": [
        ("a", RULES, {}, "rules"), ("b", GENERATION, {}, "rules"), ("b", IDENTITY, {}, "identity"),
        ("a", GENERATION, {}, "identity"), ("b", CONTEXT, {}, "context"),
    ],
    "the word of a session that is over no longer binds": [
        ("a", RULES, {"session": "one", "ended": True}, "rules"),
        ("b", GENERATION, {}, "generation"),
    ],
}  # fmt: skip
"""Who says of a block what it is, and what it is then."""


@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)
def test_whose_word_counts(world: World, words: list[tuple[Any, ...]]) -> None:
    for tenant, layer, said, holds in words:
        world.say(tenant, layer, 1, **said)
        assert world.layer(1) == holds, (tenant, layer)


def test_a_callers_word_holds_against_what_is_inferred(world: World) -> None:
    world.say("a", RULES, 1)
    written = RequestFinished("x", pack(1, 2), 0, 2 * SIZE, "stop", "t", "b")
    world.tell(written)
    assert (world.layer(1), world.layer(2)) == ("rules", "generation")


def test_importance_too_is_lowered_by_its_own_tenant_only(world: World) -> None:
    world.say("a", RULES, 1, importance=0.8)
    world.say("b", RULES, 1, importance=0.1)
    assert world.graph.explain(1)["importance"] == pytest.approx(0.8)
    world.say("a", RULES, 1, importance=0.1)
    assert world.graph.explain(1)["importance"] == pytest.approx(0.1)


def test_a_signal_reaches_its_tenants_session_only(world: World) -> None:
    world.say("a", CONTEXT, 1, session="chat-7")
    world.tell(SessionSignal("chat-7", tenant="b", ended=True))
    world.tell(SessionSignal("chat-7", ended=True))
    assert world.graph.explain_session("chat-7")["state"] == "idle"
    assert len(world.graph.tables.sessions) == 1
    world.tell(SessionSignal("chat-7", tenant="a", ended=True))
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


@pytest.mark.parametrize("limit", [0, 1, 15, 30])
def test_a_ranking_that_cannot_name_all_names_the_most_precious(world: World, limit: int) -> None:
    world.say(None, AXIOMS, *range(100, 110), session="axioms")
    world.say(None, RULES, *range(200, 210), session="rules")
    precious = [*range(209, 199, -1), *range(109, 99, -1)]
    assert world.graph.rank("e", limit).protected.tolist() == precious[max(0, 20 - limit) :]
    assert world.graph.suggest_eviction(limit) == precious[:limit], "as if nothing else is left"


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
    world.tell(*(SessionSignal(name, ended=True) for name in ("one", "two", "three")))
    assert world.protected() == set(range(100, 120)), "others may come who share it"
    assert world.graph.stats().engines["e"].protected == 10
    world.head("four", *range(20))
    assert set(range(20)) < world.protected()


def test_one_named_tenant_cannot_take_all_of_it(world: World) -> None:
    world.say("greedy", AXIOMS, *range(100, 180), session="g")
    world.say("modest", RULES, *range(200, 210), session="m")
    assert world.protected() == {*range(100, 125), *range(200, 210)}
    assert world.graph.stats().engines["e"].limited == {"inferred": 0, "tenant": 55, "all": 0}


@pytest.mark.parametrize("other", [None, "modest"])
def test_who_shares_a_prompt_pays_for_what_its_tenant_may_not_keep(
    world: World, other: str | None
) -> None:
    world.say("greedy", RULES, *range(100, 180), session="g")
    last = Segment(int(RULES), 80 * SIZE, 81 * SIZE)
    world.ask("m", *range(100, 181), tenant=other, segments=(last,))
    assert world.protected() == set(range(100, 125)), "the last block would keep 80 others"


def test_a_lease_before_the_first_session_is_kept(world: World) -> None:
    """As where a sidecar started anew, and an operator names a block of the engine's list."""
    world.tell(BlocksResident(pack(*range(1, 60))))
    world.graph.intents.apply(Intent(IntentKind.PIN, Target(block=7)))
    assert world.graph.rank("e", 1000).order.tolist()[-1] == 7


def test_the_shares_are_configuration(world: World) -> None:
    world.graph.configure(Rules(protected_share=0.1, tenant_share=0.05))
    world.say("a", RULES, *range(100, 120))
    world.say(None, RULES, *range(200, 220))
    assert len(world.protected()) == 10


def test_an_engine_that_never_said_how_large_it_is_has_no_bound(world: World) -> None:
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


NOW = 1000.0
PROTECTED, SUPERSEDED, OVER, PINNED, DUE, PLAIN = range(1, 7)


def one_block(graph: KVCacheGraph, key: int, layer: SourceLayer) -> None:
    graph.apply("e", turn_events(str(key), key, segments=(Segment(int(layer), 0, SIZE),)))


@pytest.fixture
def graph() -> KVCacheGraph:
    """The blocks 1 … 5 have the standing that each is named for; 6 has none."""
    graph = KVCacheGraph(clock=lambda: NOW)
    for key in range(1, 7):
        one_block(graph, key, SourceLayer.RULES if key == PROTECTED else SourceLayer.CONTEXT)
    blocks, sessions = graph.tables.blocks, graph.tables.sessions
    row = dict(zip(range(1, 7), blocks.find(np.arange(1, 7, dtype=np.uint64)), strict=True))
    blocks.flags[row[SUPERSEDED]] |= int(BlockFlag.SUPERSEDED)
    sessions.state[blocks.session[row[OVER]]] = SessionState.ENDED
    blocks.for_writing("pinned_until")[row[PINNED]] = NOW + 60
    sessions.wait(int(blocks.session[row[DUE]]), NOW + 1)
    blocks.mark(0, row[PLAIN], Tier.WARM)  # an engine with copies: who is due counts
    return graph


@dataclass
class Said:
    """Scores each block of key ``k`` as the test says."""

    by_key: dict[int, float]
    name: str = "said"

    def observe(self, view: View) -> None:
        pass

    def scores(self, view: View, picked: Selection) -> Scores:
        return np.array([self.by_key[int(key)] for key in picked.of(view.blocks.keys)])

    def terms(self, view: View, picked: Selection) -> Terms:
        return {"said": self.scores(view, picked)}


IN_ORDER = [SUPERSEDED, OVER, PLAIN, DUE, PINNED, PROTECTED]
LOUD = (1e9, 1e300, np.inf, -1e9, -np.inf, np.nan, 0.0)


@pytest.mark.parametrize("favourite", IN_ORDER)
@pytest.mark.parametrize("loud", LOUD)
def test_no_score_outvotes_a_rule(graph: KVCacheGraph, favourite: int, loud: float) -> None:
    graph.policy = Said({key: loud if key == favourite else 0.0 for key in range(1, 7)})
    assert graph.suggest_eviction(6) == IN_ORDER
    assert graph.rank("e", 10).protected.tolist() == [PROTECTED]


def test_the_weightiest_rule_by_which_two_blocks_differ_decides() -> None:
    weights = sorted((rule.weight for rule in LAID), key=abs)
    for place, weight in enumerate(weights):
        lighter = weights[:place]
        swing = sum(each for each in lighter if each > 0) - sum(w for w in lighter if w < 0)
        assert abs(weight) > swing


def test_a_pin_holds_against_over_and_superseded_but_not_protected(graph: KVCacheGraph) -> None:
    blocks = graph.tables.blocks
    rows = blocks.find(np.array([SUPERSEDED, OVER], dtype=np.uint64))
    blocks.for_writing("pinned_until")[rows] = NOW + 60
    graph.policy = Said(dict.fromkeys(range(1, 7), 0.0))
    ranking = graph.rank("e", 10)
    assert set(ranking.order[:2].tolist()) == {PLAIN, DUE}
    assert ranking.order[2:].tolist() == [SUPERSEDED, OVER, PINNED]
    assert ranking.protected.tolist() == [PROTECTED]
    assert graph.explain(SUPERSEDED)["standing"] == ["superseded", "pinned"]


def test_a_score_that_is_no_number_counts_as_the_middle_of_the_others() -> None:
    graph = KVCacheGraph(clock=lambda: NOW)
    for key in range(1, 6):
        one_block(graph, key, SourceLayer.CONTEXT)
    graph.policy = Said({1: 100.0, 2: 300.0, 3: np.nan, 4: 200.0, 5: 50.0})
    assert graph.rank("e", 10).order.tolist() == [2, 4, 3, 1, 5]
    graph.policy = Said(dict.fromkeys(range(1, 6), np.nan))
    assert sorted(graph.rank("e", 10).order.tolist()) == [1, 2, 3, 4, 5]


def test_scores_in_range_are_not_rounded(graph: KVCacheGraph) -> None:
    """Blocks of one standing keep the policy's order down to a millionth of a point."""
    blocks = graph.tables.blocks
    blocks.layer[: blocks.size] = SourceLayer.RULES
    blocks.flags[: blocks.size] = 0
    graph.policy = Said({key: 1e7 - 1e-6 * key for key in range(1, 7)})
    rows, scores = resident_scores(View(graph.tables, graph.rules, 0, NOW), graph.policy)
    assert len(set(scores.tolist())) == len(rows)


class Column(Said):
    """A view of a column, which a policy may give back."""

    def scores(self, view: View, picked: Selection) -> Scores:
        return picked.of(view.blocks.last_attended)


class Short(Said):
    def scores(self, view: View, picked: Selection) -> Scores:
        return np.zeros(1)


def test_the_rules_leave_the_graph_as_it_is(graph: KVCacheGraph) -> None:
    before = graph.tables.blocks.last_attended.copy()
    graph.policy = Column({})
    graph.rank("e", 10)
    assert (graph.tables.blocks.last_attended == before).all()


def test_a_policy_that_scores_other_blocks_is_refused(graph: KVCacheGraph) -> None:
    graph.policy = Short({}, name="short")
    with pytest.raises(GraphError, match="'short' gave 1 scores for 6 blocks"):
        graph.rank("e", 10)


def test_every_rule_is_explained(graph: KVCacheGraph) -> None:
    named = {key: graph.explain(key)["standing"] for key in range(1, 7)}
    assert named == {
        PROTECTED: ["protected_layer"],
        SUPERSEDED: ["superseded"],
        OVER: ["session_over"],
        PINNED: ["pinned"],
        DUE: ["due"],
        PLAIN: [],
    }
