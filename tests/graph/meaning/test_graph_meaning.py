"""What the graph believes of blocks and sessions, forks, memories and samples, and says of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kvgraph.graph.errors import GraphError
from kvgraph.graph.intents import Intent, IntentKind, Target
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.types import Authority, SourceLayer
from kvgraph.graph.wire.events import (
    BlocksAttended,
    BlocksEmbedded,
    ConfidenceSampled,
    Pressure,
    Segment,
    SessionSignal,
)
from turns import SIZE, Told, finished, spilled, started, turn_events
from wire_keys import pack


class World(Told):
    """One engine with room for a hundred blocks."""

    def __init__(self) -> None:
        super().__init__(Pressure(100, 50, 50, 0, 0), now=100.0)

    def begin(self, *keys: int, session: str | None = "s", **said: Any) -> None:
        self.tell(*turn_events(session, *keys, request="r", **said)[:-1])

    def end(self, *keys: int, session: str | None = "s", **said: Any) -> None:
        self.tell(*turn_events(session, *keys, request="r", **said)[1:])

    def block(self, key: int) -> str:
        return " ".join(self.graph.explain(key)["believes"])

    def session(self, name: str = "s") -> str:
        return " ".join(self.graph.explain_session(name)["believes"])


@pytest.fixture
def world() -> World:
    return World()


def test_a_block_tells_who_said_what_it_is(world: World) -> None:
    def part(layer: SourceLayer, block: int, who: Authority) -> Segment:
        return Segment(int(layer), block * SIZE, (block + 1) * SIZE, authority=int(who))

    said = (
        part(SourceLayer.RULES, 0, Authority.INFERRED),
        part(SourceLayer.CONTEXT, 1, Authority.CALLER),
        part(SourceLayer.AXIOMS, 2, Authority.OPERATOR),
    )
    world.begin(1, 2, 3, 4, segments=said)
    world.end(1, 2, 3, 4, 5, prompt=4)
    assert "rules, as the engine read it off the borders of messages" in world.block(1)
    assert "context, as a caller stated" in world.block(2)
    assert "axioms, as the operator stated" in world.block(3)
    assert "user_turn, as the engine read it, or by default" in world.block(4)
    assert "generation, as an answer of the model" in world.block(5)


def test_a_block_tells_until_when_it_is_kept_and_why_it_goes(world: World) -> None:
    world.begin(1, 2)
    world.end(1, 2)
    world.graph.intents.apply(Intent(IntentKind.PIN, Target(session="s"), seconds=60))
    world.now += 20
    assert "A lease keeps it for 40 s more." in world.block(2)
    world.now += 50
    assert "lease" not in world.block(2)
    world.graph.intents.apply(Intent(IntentKind.DEMOTE, Target(session="s")))
    assert "an intent demoted it" in world.block(2)


def test_a_session_tells_who_named_it_and_what_it_does(world: World) -> None:
    world.begin(1, 2)
    assert world.session() == "A caller named it. 1 of its requests are in the engine."
    world.end(1, 2, waiting_for_tool=True, expected_return_s=30.0, tool="bash")
    world.now += 10
    told = world.session()
    assert "ended in a tool call" in told
    assert "It has waited for the tool bash for 10 s. It is expected in 20 s" in told
    world.now += 25
    assert "It was expected 5 s ago" in world.session()
    world.graph.intents.signal(SessionSignal("s", waiting_for_tool=False))
    assert "somebody reads it" in world.session()
    assert "of sessions with as many turns" in world.session().lower()
    world.graph.intents.signal(SessionSignal("s", ended=True))
    assert "that it is over" in world.session()
    assert "last heard of 35 s ago" in world.session()


def test_a_session_that_nobody_named_says_so(world: World) -> None:
    world.begin(1, 2, session=None)
    assert world.session("~e/r").startswith("No caller named it")


def ask(world: World, session: str, *keys: int) -> None:
    segments = (Segment(5, 0, 32, memory_id="m-17"),)
    events = turn_events(session, *keys, request=session + str(keys), segments=segments)
    world.tell(events[0])


def test_a_memory_is_explained(world: World) -> None:
    ask(world, "a", 1, 2, 3)
    world.now += 60
    ask(world, "b", 1, 2, 4)
    told = world.graph.explain_memory("m-17")
    assert (told["recalls"], told["blocks"], told["sessions"]) == (2, 2, ["a", "b"])
    assert told["layers"] == {"memories": 2}
    assert told["known_for_s"] == 60
    assert told["last_recalled_s_ago"] == 0
    assert told["held_by"] == [f"{1:#018x}", f"{2:#018x}"]


def test_each_recall_by_another_makes_its_blocks_dearer(world: World) -> None:
    ask(world, "a", 1, 2, 3)
    before = world.graph.explain_memory("m-17")["importance"]
    ask(world, "a", 1, 2, 3)
    assert world.graph.explain_memory("m-17")["importance"] == before, "it is carried along"
    ask(world, "b", 5, 6, 7)
    once = world.graph.explain_memory("m-17")
    assert once["importance"] > before
    assert once["blocks"] == 4


def test_of_an_unknown_memory_that_is_told(world: World) -> None:
    with pytest.raises(GraphError, match="no memory of that name"):
        world.graph.explain_memory("m-18")


HEAD, PARENT = (1, 2), (3, 4, 5, 6, 7, 8)
FORK = (*HEAD, 3, 4, 20, 21, 22)


class Agents(Told):
    """Sessions that nobody names, on one engine."""

    def start(self, request: str, *keys: int) -> None:
        self.tell(started(request, *keys, more=1))

    def end(self, request: str, *keys: int, **said: Any) -> None:
        self.tell(finished(request, *keys, more=1, **said))

    def waits(self, request: str, *keys: int, back_s: float | None = None) -> None:
        """It starts, and ends in a tool call."""
        self.start(request, *keys)
        self.end(request, *keys, waiting_for_tool=True, expected_return_s=back_s)

    def said(self, request: str) -> dict[str, Any]:
        return self.graph.explain_session(f"~e/{request}")


@pytest.fixture
def agents() -> Agents:
    """Two sessions that share a head; the first waits for a tool."""
    agents = Agents()
    agents.start("other", *HEAD, 90, 91, 92)
    agents.end("other", *HEAD, 90, 91, 92)
    agents.waits("parent", *HEAD, 3)
    agents.now += 5
    agents.waits("parent1", *HEAD, *PARENT)
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
    agents.end("fork", *FORK, waiting_for_tool=True)
    assert agents.said("parent")["expected_return_in_s"] > 0
    assert agents.said("parent")["state"] == "waiting_for_tool"
    agents.now += 2
    agents.start("fork2", *FORK, 23)
    agents.now += 10
    agents.end("fork2", *FORK, 23, waiting_for_tool=False)
    assert agents.said("parent")["expected_return_in_s"] == 0


def test_what_a_caller_said_of_the_parent_stands(agents: Agents) -> None:
    agents.waits("parent2", *HEAD, *PARENT, back_s=50.0)
    agents.start("fork", *FORK)
    agents.end("fork", *FORK, waiting_for_tool=False)
    assert agents.said("parent")["expected_return_in_s"] == 50


def test_what_a_caller_says_after_us_stands(agents: Agents) -> None:
    agents.start("fork", *FORK)
    assert agents.said("parent")["expected_return_in_s"] == 10
    agents.waits("parent2", *HEAD, *PARENT, back_s=300.0)
    agents.end("fork", *FORK, waiting_for_tool=True)
    agents.now += 3
    agents.start("fork2", *FORK, 23)
    agents.end("fork2", *FORK, 23, waiting_for_tool=False)
    assert agents.said("fork")["forked_from"] == "~e/parent"
    assert agents.said("parent")["expected_return_in_s"] == 297


def test_a_parent_that_went_on_waits_no_more_for_its_fork(agents: Agents) -> None:
    agents.start("fork", *FORK)
    agents.waits("parent2", *HEAD, *PARENT)
    agents.end("fork", *FORK, waiting_for_tool=False)
    assert agents.said("parent")["expected_return_in_s"] is None


def test_a_fork_that_begins_while_its_parent_answers_is_known(agents: Agents) -> None:
    agents.start("parent2", *HEAD, *PARENT)
    agents.start("fork", *HEAD, *PARENT, 20, 21)
    assert agents.said("fork")["forked_from"] == "~e/parent"
    agents.end("parent2", *HEAD, *PARENT, waiting_for_tool=True)
    agents.end("fork", *HEAD, *PARENT, 20, 21, waiting_for_tool=False)
    assert agents.said("parent")["expected_return_in_s"] == 0


@pytest.mark.parametrize(
    ("first", "waits", "stranger"),
    [
        pytest.param(range(1, 46), True, (*range(1, 6), 100, 101), id="shares a system prompt"),
        pytest.param(range(1, 46), False, (*range(1, 6), 100, 101), id="while the first runs"),
        pytest.param(range(1, 7), False, (1, 2, 3, 4, 5, 20), id="shares most of a first prompt"),
    ],
)
def test_a_stranger_is_no_fork(first: range, waits: bool, stranger: tuple[int, ...]) -> None:
    agents = Agents()
    agents.start("first", *first)
    if waits:
        agents.end("first", *first, waiting_for_tool=True)
    agents.start("stranger", *stranger)
    agents.end("stranger", *stranger, waiting_for_tool=False)
    assert agents.said("stranger")["forked_from"] is None
    assert agents.said("first")["expected_return_in_s"] is None


@pytest.mark.parametrize(
    ("more", "tool"),
    [((), False), ((9, 10), True)],
    ids=["of what somebody reads", "with less than half of a prompt"],
)
def test_a_branch_is_no_fork(agents: Agents, more: tuple[int, ...], tool: bool) -> None:
    agents.start("parent2", *HEAD, *PARENT, *more)
    agents.end("parent2", *HEAD, *PARENT, *more, waiting_for_tool=tool)
    agents.start("branch", *FORK)
    assert agents.said("branch")["forked_from"] is None


@pytest.fixture
def sampled() -> KVCacheGraph:
    """Two requests of two sessions walked three blocks, one of which holds a memory."""
    graph, memory = KVCacheGraph(clock=lambda: 50.0), Segment(5, 0, 16, None, None, "m")
    for session, segments in (("r", (memory,)), ("q", ())):
        graph.apply("e", turn_events(session, 1, 2, 3, more=1, segments=segments)[:-1])
    return graph


def test_a_session_has_the_mean_of_what_was_sampled_of_it(sampled: KVCacheGraph) -> None:
    assert sampled.explain_session("r", None)["confidence"] is None
    said = [ConfidenceSampled(pack(3), sure, "r", "r", None) for sure in (1.0, 0.0)]
    sampled.apply("e", said)
    assert sampled.explain_session("r", None)["confidence"] == pytest.approx(0.8)
    assert sampled.explain_session("q", None)["confidence"] is None
    sampled.apply("e", [ConfidenceSampled(pack(3), 0.5, "x", "nobody", "no tenant")])
    assert sampled.explain_session("r", None)["confidence"] == pytest.approx(0.8)


def test_the_mean_of_a_block_begins_with_its_first_sample(sampled: KVCacheGraph) -> None:
    sampled.apply("e", [ConfidenceSampled(pack(3), 0.25, "r", "r", None)])
    assert sampled.explain(3)["confidence"] == pytest.approx(0.25)
    sampled.apply("e", [ConfidenceSampled(pack(3), 0.75, "r", "r", None)])
    assert sampled.explain(3)["confidence"] == pytest.approx(0.35)


def test_a_session_that_nobody_named_is_found_by_its_request(sampled: KVCacheGraph) -> None:
    sampled.apply("e", [started("u", 7, 8), ConfidenceSampled(pack(8), 0.25, "u")])
    sessions = sampled.tables.sessions
    known = {sessions.names[n]: float(sessions.confidence[n]) for n in range(sessions.size)}
    assert [sure for name, sure in known.items() if name.endswith("/u")] == [0.25]


def test_importance_grows_where_attention_goes_unless_it_was_stated(sampled: KVCacheGraph) -> None:
    blocks, mass = sampled.tables.blocks, np.array([0.05, 0.05, 0.9], dtype="<f4").tobytes()
    stated = Segment(4, 16, 32, 0.25, None, None, authority=1)
    sampled.apply("e", [started("s", 1, 2, 3, session="s", segments=(stated,))])
    before = blocks.importance[:3].copy()
    strong = np.array([0.05, 0.9, 0.05], dtype="<f4").tobytes()
    sampled.apply("e", [BlocksAttended(pack(1, 2, 3), mass)] * 50)
    sampled.apply("e", [BlocksAttended(pack(1, 2, 3), strong)] * 50)
    rows = blocks.find(np.array([1, 2, 3], np.uint64), sampled.tables.salt(0))
    assert blocks.importance[rows[2]] > before[2]
    assert blocks.importance[rows].max() <= 0.8
    assert blocks.importance[rows[1]] == np.float32(0.25), "a caller stated it"


def test_each_edge_is_explained_in_words(sampled: KVCacheGraph) -> None:
    mass = np.full(2, 0.5, dtype="<f4").tobytes()
    sampled.apply("e", [BlocksAttended(pack(1, 3), mass)] * 3)
    alike = np.ones((2, 4), dtype="<f2").tobytes()
    sampled.apply("e", [BlocksEmbedded(pack(1, 3), 4, alike), spilled(1)])
    told = sampled.explain(1)
    because = {edge["type"]: edge["because"] for edge in told["edges"]}
    assert because["co_attend"].startswith("both were among the most attended in sampled steps, 3")
    assert "cosine of 1.00" in because["semantic"]
    assert because["prefix_share"] == "2 requests went this way"
    assert len(because) == 6
    assert any("holds what is remembered as m" in each for each in told["believes"])
    assert any("of their attention" in each for each in told["believes"])
