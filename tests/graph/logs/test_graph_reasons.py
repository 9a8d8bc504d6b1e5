"""Every reason why a request missed, each produced on purpose, on a real graph."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kvgraph.advisor.page.misses import request_view
from kvgraph.graph.compiled import core
from kvgraph.graph.errors import GraphError
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.logs.evictions import LIMIT
from kvgraph.graph.logs.history import WINDOW_S
from kvgraph.graph.logs.reasons import STORE_CAUSES, Cause, DepartureRule, Detail, Reason
from kvgraph.graph.logs.requests import OtherParty
from kvgraph.graph.tables.blocks import BlockTable
from kvgraph.graph.tables.integrity import check_integrity
from kvgraph.graph.tables.tables import GraphLimits
from kvgraph.graph.types import SourceLayer, Tier, as_keys
from kvgraph.graph.wire.events import (
    AnyEvent,
    BlocksCleared,
    CacheGroup,
    EngineHello,
    GroupKind,
    Pressure,
    RequestFinished,
    RequestStarted,
    Segment,
    SessionSignal,
    TierReport,
)
from small_world import SIZE, World, pack
from turns import dropped, loaded, removed, resident, spilled, started, stored, turn_events

Step = Callable[[World], object]
WITH_STORE = TierReport(4096, *[0] * 13, 0.0, *[0] * 5, 0.0, 0.0, 0.0, reads_store=True)


RULES = (Segment(int(SourceLayer.RULES), 0, 2 * SIZE),)
STORED = spilled(1, 2, 3, tier=Tier.POOL)
OVER = SessionSignal("s", ended=True)


def serve(*keys: int, **said: Any) -> Step:
    return lambda world: world.serve(*keys, **said)


def start(*keys: int, **said: Any) -> Step:
    return lambda world: world.start(*keys, **said)


def evict(*keys: int, engine: str = "a") -> Step:
    return lambda world: world.evict(*keys, engine=engine)


def rank(*keys: int, kept: tuple[int, ...] = ()) -> Step:
    return lambda world: world.rank(*keys, kept=kept)


def tell(*events: AnyEvent, engine: str = "a") -> Step:
    return lambda world: world.tell(*events, engine=engine)


def wait(seconds: float) -> Step:
    return lambda world: setattr(world, "now", world.now + seconds)


def forget(engine: str) -> Step:
    return lambda world: world.graph.forget_engine(engine)


def protect_nothing(world: World) -> None:
    world.graph.rules = replace(world.graph.rules, protected_layers=frozenset())


def hello(engine: str, model: str = "model", **more: Any) -> EngineHello:
    return EngineHello(f"host:{engine}", model, SIZE, 100, "vllm", **more)


def late(*keys: int, found: int = 0, **said: Any) -> RequestStarted:
    """A start that is told with what its step evicted."""
    return started(f"late {keys}", *keys, found=found, more=5, session="s", **said)


def aborted(name: str, session: str, engine: str) -> Step:
    return tell(RequestFinished(name, b"", 53, 53, "abort", session), engine=engine)


SCENES = {
    # Nobody had it
    "never seen": (serve(1, 2, 3), (Reason.NEVER_SEEN, Detail.NONE, 0)),
    "what a turn appends": (
        serve(1, 2, 3), serve(1, 2, 3, 4, 5, found=3), (Reason.NEVER_SEEN, Detail.NONE, 3),
    ),
    "an edited history": (
        serve(1, 2, 3, 4), serve(1, 2, 30, 40, found=2),
        (Reason.DIVERGED, Detail.OWN_HISTORY, 2, OtherParty("s")),
    ),
    "an edited beginning": (
        serve(1, 2, 3), serve(10, 20, 30), (Reason.DIVERGED, Detail.OWN_HISTORY, 0),
    ),
    "a shared beginning": (
        serve(1, 2, 3, session="first"), serve(1, 2, 30, found=2, session="second"),
        (Reason.DIVERGED, Detail.NONE, 2, OtherParty("first")),
    ),
    "another model's blocks": (
        tell(hello("c", "another model"), engine="c"), serve(1, 2, 3, engine="c"),
        start(1, 2, 3, session="other"),
        (Reason.NEVER_SEEN, Detail.NONE, 0),
    ),
    "it reads no cache, whatever leaves it then": (
        serve(1, 2, 3),
        tell(late(1, 2, 3, reads_cache=False), removed(1, 2, 3)),
        (Reason.NOT_CACHEABLE, Detail.READS_NONE, 0),
    ),
    "nothing but a partial block is missing": (
        serve(1, 2, 3), start(1, 2, 3, found=3), (Reason.NOT_CACHEABLE, Detail.PARTIAL, 3),
    ),
    "nothing but the last block is missing": (  # vLLM computes at least one token
        serve(1, 2, 3), start(1, 2, 3, found=2, tail=0), (Reason.NOT_CACHEABLE, Detail.PARTIAL, 2),
    ),
    "what the books have is not explained away": (
        serve(1, 2, 3), serve(1, 2, 3, found=0), (Reason.UNKNOWN, Detail.IN_POOL, 0),
    ),
    "another engine has it": (
        serve(1, 2, 3, engine="b"), start(1, 2, 3),
        (Reason.OTHER_ENGINE, Detail.NONE, 0, OtherParty(engine="b")),
    ),
    "another engine had it": (
        serve(1, 2, 3, engine="b"), evict(3, 2, 1, engine="b"), start(1, 2, 3),
        (Reason.OTHER_ENGINE, Detail.ELSEWHERE, 0, OtherParty()),
    ),
    "nobody ever kept it": (
        start(1, 2, 3, engine="b"), aborted("r1", "s", "b"), start(1, 2, 3),
        (Reason.UNKNOWN, Detail.UNCOMPUTED, 0),
    ),
    # Salts
    "another salt": (
        serve(1, 2, 3, session="theirs", says=(91, 92, 93), salt=5),
        serve(11, 12, 30, session="ours", says=(91, 92, 99), salt=6),
        (Reason.OTHER_SALT, Detail.NONE, 0, OtherParty("theirs", engine="a")),
    ),
    "a salt and none": (
        serve(1, 2, says=(91, 92)), serve(11, 12, session="salted", says=(91, 92), salt=6),
        (Reason.OTHER_SALT, Detail.NONE, 0),
    ),
    "another salt's that left the pool": (
        serve(1, 2, session="theirs", says=(91, 92), salt=5), evict(1, 2),
        serve(11, 12, session="ours", says=(91, 92), salt=6), (Reason.OTHER_SALT, Detail.APART, 0),
    ),
    "the same salt, hashed with another seed": (
        serve(1, 2, session="a", says=(91, 92), salt=5),
        serve(11, 12, session="b", says=(91, 92), salt=5), (Reason.NEVER_SEEN, Detail.NONE, 0),
    ),
    "evicted, whoever else has it": (
        serve(11, 12, session="ours", says=(91, 92), salt=6), evict(11, 12),
        serve(1, 2, session="theirs", says=(91, 92), salt=5),
        serve(11, 12, session="ours", says=(91, 92), salt=6),
        (Reason.EVICTED, DepartureRule.LRU, 0),
    ),
    "another model that says the same": (
        tell(hello("c", "another model"), engine="c"),
        serve(1, 2, session="theirs", says=(91, 92), salt=5, engine="c"),
        serve(11, 12, session="ours", says=(91, 92), salt=6), (Reason.NEVER_SEEN, Detail.NONE, 0),
    ),
    # By what rule it left
    "no ranking named it": (
        serve(1, 2, 3), rank(9), evict(3), start(1, 2, 3, found=2),
        (Reason.EVICTED, DepartureRule.UNRANKED, 2),
    ),
    "its session was over": (
        serve(1, 2, 3), tell(OVER), rank(3, 2, 1), evict(3),
        start(1, 2, 3, found=2, session="another"),
        (Reason.EVICTED, DepartureRule.SESSION_OVER, 2, OtherParty("s")),
    ),
    "superseded": (
        serve(1, 2, 3), serve(1, 2, 30, found=2), rank(3, 30, 2, 1), evict(3),
        start(1, 2, 3, found=2), (Reason.EVICTED, DepartureRule.SUPERSEDED, 2),
    ),
    "though it was protected": (
        serve(1, 2, 3, segments=RULES), rank(3, kept=(2, 1)), evict(3, 2), start(1, 2, 3, found=1),
        (Reason.EVICTED, DepartureRule.PROTECTED_LAYER, 1),
    ),
    "more is protected than may be, by the policy": (
        serve(1, 2, 3, segments=RULES), rank(3, 2, kept=(1,)), evict(2), start(1, 2, 3, found=1),
        (Reason.EVICTED, DepartureRule.PROTECTED_SHARE, 1),
    ),
    "more is protected than may be, by LRU": (
        serve(1, 2, 3, segments=RULES), rank(kept=(1,)), evict(2), start(1, 2, 3, found=1),
        (Reason.EVICTED, DepartureRule.PROTECTED_SHARE, 1),
    ),
    "a layer that is protected no longer": (
        serve(1, 2, 3, segments=RULES), protect_nothing, rank(3, 2, 1), evict(2),
        start(1, 2, 3, found=1), (Reason.EVICTED, DepartureRule.POLICY, 1),
    ),
    "evicted here, and another engine has it": (
        serve(1, 2, engine="b"), serve(1, 2), evict(2), start(1, 2, found=1),
        (Reason.EVICTED, DepartureRule.LRU, 1, OtherParty("s", engine="b")),
    ),
    # An engine keeps by itself what callers protect, until a ranking can know of it.
    "no ranking knew of its protection": (
        rank(kept=(9,)), serve(1, 2, 3, segments=RULES), evict(2), start(1, 2, 3, found=1),
        (Reason.EVICTED, DepartureRule.PROTECTED_LAYER, 1),
    ),
    "protected, of a session that was over": (
        serve(1, 2, 3, segments=RULES), tell(OVER), rank(3, 2, 1), evict(2),
        start(1, 2, 3, found=1, session="another"),
        (Reason.EVICTED, DepartureRule.SESSION_OVER, 1),
    ),
    # Copies and the shared store
    "loading lost against computing": (
        serve(1, 2, 3), tell(spilled(2, 3)), evict(2, 3),
        start(1, 2, 3, found=1), (Reason.LOAD_SLOWER, Detail.NONE, 1),
    ),
    "a cause from a later version": (
        serve(1, 2), tell(spilled(2)), evict(2),
        tell(dropped(2, cause=200)), start(1, 2, found=1),
        (Reason.COPY_LOST, Cause.UNKNOWN, 1),
    ),
    "in the store that this engine reads": (
        tell(WITH_STORE), tell(WITH_STORE, engine="b"), serve(1, 2, 3, engine="b"),
        tell(STORED, engine="b"), start(1, 2, 3), (Reason.IN_STORE, Detail.NONE, 0),
    ),
    "in the store, and here until lately": (
        tell(WITH_STORE), tell(WITH_STORE, engine="b"), serve(1, 2, 3, engine="b"),
        tell(STORED, engine="b"), serve(1, 2, 3), evict(3), start(1, 2, 3, found=2),
        (Reason.IN_STORE, Detail.NONE, 2),
    ),
    "in a store that this engine does not read": (
        tell(WITH_STORE, engine="b"), serve(1, 2, 3, engine="b"), tell(STORED, engine="b"),
        start(1, 2, 3), (Reason.OTHER_ENGINE, Detail.NONE, 0),
    ),
    "lost in the store, of which nobody knew it was there": (
        tell(WITH_STORE), serve(1, 2, 3, engine="b"),
        tell(dropped(1, tier=Tier.POOL, cause=Cause.STORE_GONE)), start(1, 2, 3),
        (Reason.OTHER_ENGINE, Detail.NONE, 0),
    ),
    # Under way, reset, unheard of
    "a reset": (
        serve(1, 2, 3), tell(BlocksCleared()), start(1, 2, 3), (Reason.RESET, Detail.NONE, 0),
    ),
    "another request is computing it": (
        start(1, 2, 3, session="first"), start(1, 2, 3, session="second"),
        (Reason.NOT_CACHEABLE, Detail.UNDER_WAY, 0),
    ),
    "two requests of one batch": (
        tell(*(started(each, 1, 2, session=each) for each in "xy")),
        (Reason.NOT_CACHEABLE, Detail.UNDER_WAY, 0),
    ),
    "another computes it though the first to do so went away": (
        start(1, 2, 3, session="first"), start(1, 2, 3, session="second"),
        aborted("r1", "first", "a"), start(1, 2, 3, session="third"),
        (Reason.NOT_CACHEABLE, Detail.UNDER_WAY, 0),
    ),
    "its news were lost": (
        serve(1, 2, 3), tell(resident(1, 2)), start(1, 2, 3, found=2),
        (Reason.UNKNOWN, Detail.UNHEARD, 2),
    ),
    # An engine tells of a step's requests first, and of what their allocations evicted then.
    "it went in the very step": (
        serve(1, 2, 3), tell(late(1, 2, 3, found=2), removed(3)),
        (Reason.EVICTED, DepartureRule.LRU, 2),
    ),
    "a reset took it after the request looked": (
        serve(1, 2, 3), start(1, 2, 3, found=1),
        tell(BlocksCleared(), stored(9)), evict(9),
        (Reason.UNKNOWN, Detail.IN_POOL, 1),
    ),
    # A message tells of several steps: what a later one evicts, it had as the request looked.
    "it went in a later step": (
        serve(1, 2, 3), tell(late(1, 2, 3, found=1), removed(3), stored(9), removed(2)),
        (Reason.UNKNOWN, Detail.IN_POOL, 1),
    ),
    "the first evictions after a request are its step's": (
        serve(4, 5, 6),
        tell(late(4, 5, 6, found=1), stored(9, 5), removed(6, 5), stored(5, behind=4), removed(9)),
        (Reason.EVICTED, DepartureRule.LRU, 1),
    ),
    "it left before, and that is told at once": (
        serve(1, 2, 3), tell(removed(2), stored(9), late(1, 2, 3, found=1)),
        (Reason.EVICTED, DepartureRule.LRU, 1),
    ),
    "it went long after the request looked": (
        serve(1, 2, 3), start(1, 2, 3, found=1), wait(600.0), evict(2),
        (Reason.UNKNOWN, Detail.IN_POOL, 1),
    ),
    "an engine that comes back has its log": (
        serve(1, 2, 3), evict(2), forget("a"), tell(hello("a"), resident(1)),
        serve(1, 2, 3, found=1), (Reason.EVICTED, DepartureRule.LRU, 1),
    ),
    "what an engine held that came back": (
        serve(1, 2, 3), forget("a"), tell(hello("a"), resident()), start(1, 2, 3),
        (Reason.UNKNOWN, Detail.UNHEARD, 0),
    ),
    "an engine in another's place begins anew": (
        serve(1, 2), evict(2), forget("a"), tell(hello("c"), engine="c"), start(1, 2, engine="c"),
        (Reason.UNKNOWN, Detail.UNCOMPUTED, 0),
    ),
    # What an engine computed before it was linked is told after the list that has it already.
    "a list of the pool ahead of the news": (
        tell(resident(1, 2, 3)), start(1, 2, 3), (Reason.NEVER_SEEN, Detail.NONE, 0),
    ),
    # The list of the pool comes before the start that was queued; then the block is preempted.
    "a request's own block that a list brought first": (
        tell(resident(1, 2, 3)),
        tell(
            late(1, 2, 3),
            stored(1, 2, 3),
        ),
        evict(3, 2, 1), (Reason.NEVER_SEEN, Detail.NONE, 0),
    ),
}  # fmt: skip
"""What happens, and the last request's reason, its detail, the first block that it missed, and
where it matters whose that was."""
SAID = {
    "never seen": "was never asked for before",
    "a shared beginning": "up to there the prompt is that of session first",
    "no ranking named it": "left the pool",
    "another engine has it": "would have found it",
    "loading lost against computing": "computing it was judged faster than loading",
    "a cause from a later version": "with a copy, and the copy is gone",
    "a reset": "was in the pool until the prefix cache was reset",
    "nothing but a partial block is missing": "all that can be reused was found",
    "what the books have is not explained away": "the news of its eviction was lost",
    "in the store that this engine reads": "is in the shared store, but did not come from there",
    "another salt": "session theirs's prompt says the same up to there under another one",
}
"""A part of what is said of it in words."""


@pytest.mark.parametrize("scene", SCENES)
def test_a_request_missed_for_this_reason(world: World, scene: str) -> None:
    *steps, (reason, detail, index, *other) = SCENES[scene]
    for step in steps:
        step(world)
    assert world.last() == (reason, detail, index)
    log = world.history.requests
    assert not other or log.names(log.next - 1).other == other[0]
    said = Counter(int(log.record(number)["reason"]) for number in range(log.next))
    if not world.history.open_cases:
        assert said == {each: count for each in Reason if (count := world.history.totals[each])}
    assert SAID.get(scene, "") in request_view(world.history, log.next - 1, float).miss.sentence


def test_of_two_requests_of_one_batch_the_later_diverged_from_the_other(world: World) -> None:
    world.serve(1, 2, session="first")
    second = started("q", 1, 2, 3, found=2, more=5, session="second")
    world.tell(second, started("r", 1, 2, 30, found=2, more=5, session="third"))
    assert world.last() == (Reason.DIVERGED, Detail.NONE, 2)
    assert world.other() == ("second", None)
    record = world.history.requests.record(1)
    assert int(record["reason"]) == Reason.NEVER_SEEN


def test_evicted_by_the_engines_own_order(world: World) -> None:
    world.serve(1, 2, 3)
    world.evict(3, 2)
    evicted_at = world.now
    world.serve(1, 2, 3, found=1)
    assert world.last() == (Reason.EVICTED, DepartureRule.LRU, 1)
    record = world.history.requests.record(1)
    assert float(record["at"] - record["ago"]) == pytest.approx(evicted_at, abs=0.02)
    log, tables = world.history.evictions[0], world.graph.tables
    (row,) = tables.blocks.find(as_keys([2]), tables.salt(0))
    assert int(log.record(int(record["eviction"]))["key"]) == tables.blocks.keys[row]


def test_evicted_by_the_policy_with_its_place(world: World) -> None:
    world.serve(1, 2, 3)
    world.rank(9, 3, 2)
    world.evict(3)
    world.start(1, 2, 3, found=2)
    assert world.last() == (Reason.EVICTED, DepartureRule.POLICY, 2)
    log = world.history.evictions[0]
    assert int(log.record(0)["place"]) == 1
    assert world.history.ranking_at(0, log.at(0)) == 7


def test_more_evictions_at_once_than_the_log_keeps_are_known_as_evictions(world: World) -> None:
    keys = range(1, LIMIT + 101)
    world.tell(resident(*keys))
    world.evict(*keys)
    assert world.history.evictions[0].evicted[DepartureRule.LRU] == len(keys)
    world.start(1, 2, 3)
    assert world.last() == (Reason.EVICTED, DepartureRule.FORGOTTEN, 0)
    sentence = request_view(world.history, 0, float).miss.sentence
    assert sentence.startswith("Block 1 of 3 left the pool longer ago than the log reaches.")
    world.start(101)
    assert world.last() == (Reason.EVICTED, DepartureRule.LRU, 0)


def test_what_is_loaded_is_not_missed(world: World) -> None:
    world.serve(1, 2, 3)
    world.tell(spilled(2, 3))
    world.evict(2, 3)
    world.start(1, 2, 3, 4, found=1, loading=2)
    assert world.last() == (Reason.NEVER_SEEN, Detail.NONE, 3)
    record = world.history.requests.record(1)
    assert [int(record[name]) for name in ("pool", "loaded", "prefetched")] == [1, 2, 0]


@pytest.mark.parametrize("cause", list(Cause))
def test_a_copy_was_lost_with_its_cause(world: World, cause: Cause) -> None:
    world.serve(1, 2, 3)
    world.tell(spilled(3), spilled(3, tier=4))
    world.evict(3)
    world.tell(dropped(3, cause=cause))
    name = world.start(1, 2, 3, found=2)
    assert world.last()[0] is Reason.LOAD_SLOWER  # there is one on disk yet
    world.tell(RequestFinished(name, pack(1, 2), 53, 53, "abort", "s"))
    world.tell(dropped(3, tier=4, cause=cause))
    world.start(1, 2, 3, found=2)
    assert world.last() == (Reason.COPY_LOST, cause, 2)


def stores_read(world: World) -> None:
    for engine in "ab":
        world.tell(WITH_STORE, engine=engine)


@pytest.mark.parametrize("cause", STORE_CAUSES)
@pytest.mark.parametrize("was_here", [False, True])
def test_the_store_lost_it_with_its_cause(world: World, cause: Cause, was_here: bool) -> None:
    stores_read(world)
    world.serve(1, 2, 3, engine="b")
    if was_here:
        world.serve(1, 2, 3, engine="a")
        world.evict(3, 2, 1, engine="a")
    world.tell(STORED, engine="b")
    world.tell(dropped(1, tier=Tier.POOL, cause=cause), engine="a")
    name = world.start(1, 2, 3, engine="a")
    assert world.last() == (Reason.COPY_LOST, cause, 0)
    world.tell(RequestFinished(name, b"", 53, 53, "abort", "s"), engine="a")
    world.tell(spilled(1, tier=Tier.POOL), engine="a")
    world.start(1, 2, 3, engine="a")
    assert world.last()[0] is Reason.IN_STORE, "it is there again"


def test_what_is_in_the_store_alone_is_held_by_nobody(world: World) -> None:
    world.serve(1, 2, 3)
    world.tell(spilled(2, 3, 99, tier=Tier.POOL))
    world.evict(3, 2)
    ranking = world.graph.rank("a", 10)
    assert 2 not in ranking.order.tolist()
    with pytest.raises(GraphError, match=r"no block 0x0{14}63 \(99\)"):
        world.graph.explain(99)  # nobody but the store ever heard of it
    assert world.graph.explain(3)["copies"] == "store on a"
    check_integrity(world.graph.tables)


def test_another_group_of_layers_let_go_of_its_part(world: World) -> None:
    """Whatever the books say: the engine saw the block as it looked."""
    groups = CacheGroup(GroupKind.FULL, 0, SIZE), CacheGroup(GroupKind.WINDOW, 1024, SIZE)
    world.tell(hello("a", groups=groups))
    world.serve(1, 2, 3)
    world.serve(1, 2, 3, found=1, lacking=1)
    assert world.last() == (Reason.OTHER_GROUP, 1, 1)
    assert world.history.totals[Reason.OTHER_GROUP] == 1
    view = request_view(world.history, 1, float).miss
    assert view.sentence == (
        "Block 2 of 3 is in the pool, but cache group 1 (a sliding window of 1,024 tokens) had let "
        "go of a part of the window that ends there."
    )
    assert view.key is not None
    world.serve(1, 2, 3, found=2, lacking=5)
    assert "but cache group 5 had let go" in request_view(world.history, 2, float).miss.sentence


def test_prefetched_blocks_are_counted_once(world: World) -> None:
    world.serve(1, 2, 3)
    world.tell(spilled(2, 3))
    world.evict(2, 3)
    world.tell(loaded(2, 3))
    for prefetched in (2, 0):
        world.serve(1, 2, 3, found=3)
        record = world.history.requests.record(world.history.requests.next - 1)
        assert int(record["prefetched"]) == prefetched
        assert int(record["pool"]) == 3 - prefetched


def test_an_evicted_block_that_is_wanted_again_is_regretted_within_the_window(world: World) -> None:
    world.serve(1, 2, 3)
    world.evict(3)
    world.serve(1, 2, 3, found=2)
    log = world.history.evictions[0]
    assert int(log.wanted[DepartureRule.LRU]) == 1
    assert int(log.record(0)["wanted"])
    world.evict(3)
    world.now += 2 * WINDOW_S
    world.serve(1, 2, 3, found=2)
    assert int(log.wanted[DepartureRule.LRU]) == 1
    assert not int(log.record(1)["wanted"])


def test_what_is_computed_again_is_told_apart_by_whose_it_was(world: World) -> None:
    world.serve(1, 2, 3, 4, session="s")
    world.serve(1, 2, 30, found=2, session="t")  # now 1 and 2 are shared
    world.evict(4, 3, 2)
    world.serve(1, 2, 3, 4, found=1, session="s")
    assert world.history.lost.tolist() == [2, 1]
    assert world.history.beyond.sum(axis=1).tolist() == [2, 1]


def test_a_name_that_was_forgotten_and_a_row_that_was_reused_tell_nothing_old(world: World) -> None:
    world.serve(1, 2, 3)
    world.evict(1, 2, 3)
    world.graph.configure(world.graph.rules, GraphLimits(max_ghosts=0, ghost_share=0.0))
    world.graph.apply("a", [Pressure(1, 1, 0, 0, 0)])
    assert len(world.graph.tables.blocks) == 0
    world.graph.configure(world.graph.rules, GraphLimits())
    world.serve(4, 5, 6, session="t")
    world.serve(7, 8, 9, session="u")
    assert world.last() == (Reason.NEVER_SEEN, Detail.NONE, 0)


def test_news_of_an_engine_that_is_gone_finds_room_in_its_log() -> None:
    graph = KVCacheGraph()
    graph.apply("one", [started("r", 1)])
    graph.forget_engine("one")
    graph.apply("one", [stored(1, 2)])
    graph.forget_engine("one")
    assert len(graph.tables.blocks) == 2


def test_a_block_of_the_sessions_answer_may_go_in_the_very_step_that_wants_it(world: World) -> None:
    """Nobody asked for it before, so it is not among the prompts that the session told."""
    world.start(1, 2)
    world.tell(stored(1, 2), stored(3, behind=2))
    world.end("r1", 1, 2, 3)
    world.tell(late(1, 2, 3, 4, found=2), removed(3))
    assert world.last() == (Reason.EVICTED, DepartureRule.LRU, 2)
    assert world.history.totals[Reason.DIVERGED] == 0
    miss = request_view(world.history, 1, float).miss
    assert miss.evicted_at == world.now
    assert "Block 3 of 4 left the pool just then. Why:" in miss.sentence


def test_what_is_told_of_a_step_a_moment_later_did_not_happen_after_it(world: World) -> None:
    world.serve(1, 2, 3)
    world.start(1, 2, 3, found=1)
    began = world.now
    world.now += 0.0071  # the log of evictions counts in hundredths
    world.evict(2)
    assert world.last() == (Reason.EVICTED, DepartureRule.LRU, 1)
    miss = request_view(world.history, 1, float).miss
    assert miss.evicted_at == began
    assert "left the pool just then" in miss.sentence


def test_what_is_told_of_a_later_step_changes_no_reason(world: World) -> None:
    """As of an engine with a draft model, which computes the last block that it found again."""
    world.serve(1, 2, 3)
    world.start(1, 2, 3, found=1)
    world.start(7, 8, session="another")  # another message, and none about blocks
    world.evict(2)
    assert int(world.history.requests.record(1)["reason"]) == Reason.UNKNOWN
    world.serve(4, 5, 6)
    world.tell(late(4, 5, 6, found=1), stored(9), late(10), removed(5))
    assert world.history.totals[Reason.UNKNOWN] == 2
    world.tell(late(4, 6), removed(9))
    world.evict(4)
    assert world.last()[0] is Reason.UNKNOWN
    assert world.history.totals[Reason.EVICTED] == 0
    assert not world.history.open_cases


def grown_tree() -> tuple[BlockTable, float]:
    """Chains that share starts, of which many were evicted and forgotten, and their rows reused."""
    rng, now, keys = random.Random(3), [10.0], dict[tuple[int, ...], int]()
    graph = KVCacheGraph(limits=GraphLimits(max_ghosts=40), clock=lambda: now[0])
    for number in range(400):
        now[0] += rng.choice((0.0, 1.0))
        path = tuple(rng.randrange(3) for _ in range(rng.randrange(2, 9)))
        steps = [path[: end + 1] for end in range(len(path))]
        chain = [keys.setdefault(step, len(keys) + 1) for step in steps]
        graph.apply("e", turn_events(f"s{number % 17}", *chain))
        if number % 3 == 0:
            graph.apply("e", [removed(*rng.choices(sorted(keys.values()), k=20))])
    return graph.tables.blocks, now[0]


def sibling_of(blocks: BlockTable, row: int, parent: int, session: int, now: float) -> int | None:
    if blocks.created[parent] >= now and blocks.walkers[parent] <= 1:
        return None
    others = np.flatnonzero(blocks.parent[: blocks.size] == parent)
    known = (blocks.created[others] < now) | (blocks.walkers[others] > 0)
    others = others[known & (others != row)]
    if not len(others):
        return None
    theirs = blocks.session[others]
    if session >= 0 and (theirs == session).any():
        return session
    return int(theirs[np.argmax(blocks.last_attended[others])])


@pytest.mark.parametrize("copied", [False, True])
def test_siblings_are_found_as_by_a_look_at_all_blocks(copied: bool) -> None:
    blocks, now = grown_tree()
    if copied:  # nobody noted its links one by one
        other = BlockTable()
        other.load_columns(blocks.columns())
        blocks = other
    live, found = blocks.live_rows().tolist(), set[int | None]()
    for parent in live * 2:
        for row in [*np.flatnonzero(blocks.parent[: blocks.size] == parent).tolist(), live[0]]:
            for session in (-1, 3, 7):
                expected = sibling_of(blocks, row, parent, session, now)
                said = core.sibling(blocks, blocks.size, row, parent, session, now)
                assert said == expected
                found.add(said)
    assert len(found) > 10
    assert core.heads_nbytes(blocks)


def test_what_all_users_share_costs_each_no_more_than_what_a_few_share() -> None:
    """A system prompt has a block behind it for each user, and each new one asks who else did."""

    def cost(users: int) -> float:
        now = [1.0]
        graph = KVCacheGraph(limits=GraphLimits(max_ghosts=1 << 20), clock=lambda: now[0])
        graph.apply("e", [stored(1)])
        for first in range(2, users + 2, 1000):
            graph.apply("e", [stored(key, behind=1) for key in range(first, first + 1000)])
        now[0] += 1.0
        blocks, took = graph.tables.blocks, list[float]()
        parent, row = blocks.find(as_keys([1, 2])).tolist()
        for _ in range(9):
            began = time.thread_time()
            assert core.sibling(blocks, blocks.size, row, parent, -1, now[0]) == -1
            took.append(time.thread_time() - began)
        return min(took)

    assert cost(96_000) < 6 * cost(3000), "32 times as many"


def test_a_log_gets_room_with_the_table_and_not_when_a_block_leaves() -> None:
    graph = KVCacheGraph()
    graph.apply("e", [resident(), stored(*range(1, 11))])
    graph.apply("e", [removed(*range(1, 11))])
    graph.apply("e", [stored(*range(1, 20_000)), stored(*range(30_000, 50_000))])
    (log,) = graph.tables.history.evictions.values()
    assert len(log.marks) == len(graph.tables.blocks.alive)
    assert log.nbytes < 1_000_000, "room that nobody wrote to is not counted"
