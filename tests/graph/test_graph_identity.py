"""Two models in one sidecar: the same hash of two models is two blocks, and each hears its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from kvgraph.graph import snapshot
from kvgraph.graph.types import NO_ROW
from kvgraph.graph.wire.events import (
    AnyEvent,
    BlocksAttended,
    BlocksEmbedded,
    ConfidenceSampled,
    EngineHello,
)
from turns import (
    SIZE,
    Told,
    dropped,
    finished,
    loaded,
    removed,
    resident,
    spilled,
    started,
    stored,
    turn_events,
)
from wire_keys import pack

KEYS = (11, 12, 13)


def hello(model: str) -> EngineHello:
    return EngineHello("e", model, SIZE, 100, "v")


class World(Told):
    """A graph whose clock moves a second with every batch."""

    def tell(self, *events: AnyEvent, engine: str = "e") -> None:
        self.now += 1.0
        super().tell(*events, engine=engine)

    def serve(self, engine: str, request: str, *keys: int) -> None:
        """A request of a session that is called like the engine."""
        head = stored(keys[0])
        tail = stored(*keys[1:], behind=keys[0])
        start, _, end = turn_events(engine, *keys, request=request, more=1)
        self.tell(start, head, tail, end, engine=engine)


@pytest.fixture
def world() -> World:
    """Two engines with a model each; the same prompt in both, and more of it in the first."""
    world = World()
    for engine in ("a", "b"):
        world.tell(hello(f"model-{engine}"), engine=engine)
    world.serve("a", "a1", *KEYS, 14)
    world.serve("b", "b1", *KEYS)
    return world


def test_the_same_hash_of_two_models_is_two_blocks(world: World) -> None:
    stats = world.graph.stats()
    assert len(world.graph.tables.blocks) == 7
    assert stats.engines["a"].resident == 4
    assert stats.engines["b"].resident == 3
    for row in world.graph.tables.blocks.live_rows().tolist():
        held = np.flatnonzero(world.graph.tables.blocks.tiers[:, row])
        assert len(held) == 1
        assert world.graph.tables.blocks.walkers[row] == 1


def test_engines_with_one_model_share_a_block(world: World) -> None:
    world.tell(hello("model-a"), engine="c")
    world.serve("c", "c1", *KEYS)
    assert len(world.graph.tables.blocks) == 7
    assert set(world.graph.explain(11)["tiers"]) == {"a", "c"}


def test_rankings_name_blocks_as_their_engine_does(world: World) -> None:
    for engine, keys in (("a", {*KEYS, 14}), ("b", set(KEYS))):
        ranking = world.graph.rank(engine, 100)
        assert set(ranking.order.tolist()) == keys
        assert set(ranking.spill_first.tolist()) <= keys
        assert set(world.graph.suggest_eviction(100, engine)) == keys
    assert world.graph.rank("a", 100).order.tolist() == [14, 13, 12, 11]  # a chain, its tail first


def test_what_one_engine_loses_the_other_keeps(world: World) -> None:
    world.tell(removed(*KEYS), engine="a")
    assert world.graph.resident_count("a") == 1
    assert set(world.graph.rank("b", 100).order.tolist()) == set(KEYS)


def test_copies_are_ordered_back_by_the_engines_own_keys(world: World) -> None:
    world.tell(spilled(*KEYS), removed(*KEYS), engine="b")
    assert world.graph.rank("b", 9).demote_first.tolist() == [13, 12, 11]
    waits = {"waiting_for_tool": True, "expected_return_s": 0.5}
    world.tell(finished("b1", *KEYS, more=1, session="b", **waits), engine="b")
    assert world.graph.prefetch_order("b", 9).tolist() == list(KEYS)
    assert world.graph.prefetch_order("a", 9).tolist() == []
    world.tell(loaded(*KEYS), dropped(*KEYS), engine="b")
    assert set(world.graph.explain(11)["tiers"]["b"]) == {"hot"}
    assert len(world.graph.tables.blocks) == 7


def test_what_follows_blocks_in_use_comes_back_by_its_engines_keys(world: World) -> None:
    blocks = world.graph.tables.blocks
    world.graph.tables.sessions.end(world.graph.tables.sessions.rows_named("a")[0])
    for n in range(3):  # others walk the same chain, so that what follows 11 is what comes next
        world.tell(started(f"n{n}", *KEYS, 14), finished(f"n{n}", *KEYS, 14), engine="a")
    world.tell(spilled(14), removed(14), engine="a")
    world.now += 10_000
    blocks.hit_count[:] = 1  # worth a copy, though nobody is expected back
    assert world.graph.prefetch_order("a", 5).tolist() == []
    world.tell(started("now", *KEYS, session="new"), engine="a")
    assert world.graph.prefetch_order("a", 5).tolist() == [14]


def test_signals_of_attention_confidence_and_embeddings_reach_the_right_model(world: World) -> None:
    vectors = np.eye(4, dtype="<f2")[:1].tobytes()
    for engine in ("a", "b"):
        world.tell(BlocksEmbedded(pack(11), 4, vectors), engine=engine)
    mass = np.array([0.5], dtype="<f4").tobytes()
    world.tell(BlocksAttended(pack(11), mass), ConfidenceSampled(pack(11), 0.0), engine="b")
    tables = world.graph.tables
    mine, other = (int(tables.blocks.find(np.array([11], np.uint64), tables.salt(each))[0])
                   for each in (1, 0))  # fmt: skip
    assert tables.blocks.attention[mine] > 0 == tables.blocks.attention[other]
    assert tables.blocks.confidence[mine] < 1 == tables.blocks.confidence[other]
    assert world.graph.stats().edges["semantic"] == 0  # what one model means is nothing to another


def test_a_key_is_asked_for_as_engines_say_it(world: World) -> None:
    told = world.graph.explain(11)
    assert told["id"] == f"{11:#018x}"
    assert told["model"] == "model-b"  # of two that are held, the last used
    assert told["ranks"] == {"b": {"ranked_by": "classic", "rank": 2, "of": 3}}
    world.tell(removed(11), engine="b")
    assert world.graph.explain(11)["model"] == "model-a"  # one that is held before one that is not
    assert world.graph.explain(14)["parent"] == f"{13:#018x}"
    assert {each["node"] for each in world.graph.neighbors(14)} == {f"{13:#018x}"}


def test_an_engine_that_comes_back_with_another_model_holds_nothing_of_before(world: World) -> None:
    world.tell(spilled(*KEYS), engine="b")
    world.tell(hello("model-b"), engine="b")
    assert world.graph.resident_count("b") == 3, "a repeated hello changes nothing"
    world.tell(hello("model-c"), engine="b")
    assert world.graph.stats().engines["b"].resident == 0
    assert not world.graph.rank("b", 9).demote_first.size
    world.tell(resident(11), engine="b")
    assert world.graph.explain(11)["model"] == "model-c"
    assert world.graph.rank("b", 9).order.tolist() == [11]


def test_an_engine_that_says_no_model_has_blocks_of_its_own() -> None:
    world = World()
    world.tell(stored(*KEYS), engine="observed")
    world.tell(hello("m"), stored(*KEYS), engine="a")
    assert len(world.graph.tables.blocks) == 6
    assert world.graph.tables.blocks.find(np.array([11], np.uint64))[0] != NO_ROW
    world.graph.forget_engine("a")
    world.tell(stored(11), engine="new")  # in the column that "a" had
    assert set(world.graph.explain(11)["tiers"]) == {"observed", "new"}


def test_an_engine_that_is_only_watched_runs_what_configuration_says() -> None:
    world = World(models={"watched": "m", "other": "kv:other"})
    for _ in range(2):  # also once it was forgotten: its events have a hole, or it was restarted
        world.graph.forget_engine("watched")
        for engine in ("watched", "other"):
            world.tell(stored(*KEYS), engine=engine)
        world.tell(hello("m"), resident(*KEYS), engine="a")
        assert len(world.graph.tables.blocks) == 6
        world.tell(loaded(*KEYS), engine="a")
        assert set(world.graph.explain(11)["tiers"]) == {"a", "watched"}


def test_a_session_that_asks_two_models_leaves_neither_chain_behind(world: World) -> None:
    for turn in range(2):
        for engine in ("a", "b"):
            request = f"{engine}-{turn}"
            start, _, end = turn_events("both", *KEYS, request=request)
            world.tell(start, end, engine=engine)
    assert world.graph.stats().counters.get("blocks_superseded", 0) == 0


def test_a_snapshot_knows_whose_each_block_is(world: World, tmp_path: Path) -> None:
    snapshot.save(world.graph, tmp_path / "graph.kvg")
    restored = World()
    snapshot.load(restored.graph, tmp_path / "graph.kvg")
    restored.tell(hello("model-b"), resident(*KEYS), engine="b")
    assert len(restored.graph.tables.blocks) == 7
    assert restored.graph.explain(11)["requests"] == 1
    assert restored.graph.explain(14)["id"] == f"{14:#018x}"
    assert set(restored.graph.rank("b", 9).order.tolist()) == set(KEYS)
