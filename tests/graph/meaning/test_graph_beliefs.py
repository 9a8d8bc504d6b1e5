"""What `explain` says in sentences of a block and of a session."""

from __future__ import annotations

import pytest
from kvgraph.graph.intents import Intent, IntentKind, Target
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.types import Authority, SourceLayer
from kvgraph.graph.wire.events import (
    BlocksStored,
    Pressure,
    RequestFinished,
    RequestStarted,
    Segment,
    SessionSignal,
)
from wire_keys import pack

SIZE = 16


class World:
    """One engine with room for a hundred blocks, and a clock."""

    def __init__(self) -> None:
        self.now = 100.0
        self.graph = KVCacheGraph(clock=lambda: self.now)
        self.graph.apply("e", [Pressure(100, 50, 50, 0, 0)])

    def begin(
        self, *keys: int, session: str | None = "s", segments: tuple[Segment, ...] = ()
    ) -> None:
        began = RequestStarted("r", pack(*keys), SIZE * len(keys), 0, SIZE, session, None, segments)
        self.graph.apply("e", [began, BlocksStored(pack(*keys), None, SIZE)])

    def end(self, *keys: int, prompt: int, session: str | None = "s", **said: object) -> None:
        ended = RequestFinished(
            "r", pack(*keys), SIZE * prompt, SIZE * len(keys), "finished_stopped", session, None,
            **said,  # type: ignore[arg-type]
        )  # fmt: skip
        self.graph.apply("e", [BlocksStored(pack(*keys), None, SIZE), ended])

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
    world.end(1, 2, prompt=2)
    wanted = Intent(IntentKind.PIN, Target(session="s"), seconds=60)
    world.graph.intents.apply(wanted)
    world.now += 20
    assert "A lease keeps it for 40 s more." in world.block(2)
    world.now += 50
    assert "lease" not in world.block(2)
    world.graph.intents.apply(Intent(IntentKind.DEMOTE, Target(session="s")))
    assert "an intent demoted it" in world.block(2)


def test_a_session_tells_who_named_it_and_what_it_does(world: World) -> None:
    world.begin(1, 2)
    assert world.session() == "A caller named it. 1 of its requests are in the engine."
    world.end(1, 2, prompt=2, waiting_for_tool=True, expected_return_s=30.0, tool="bash")
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
