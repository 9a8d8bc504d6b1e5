"""Requests told by their tips: what an overloaded sidecar knows of them all the same."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.wire.events import (
    AnyEvent,
    BlocksStored,
    EngineHello,
    RequestFinished,
    RequestStarted,
    Segment,
)
from kvgraph.hooks.link.outbox import as_tip
from wire_keys import pack

SIZE = 16


def turn(number: int, keys: range, found: int, session: str | None) -> list[AnyEvent]:
    """A request whose first ``found`` blocks are cached, and which writes its last two."""
    prompt, whole = keys[:-2], pack(*keys)
    tokens, name = SIZE * len(prompt), f"r{number}"
    parent = keys[found - 1] if found else None
    return [
        RequestStarted(name, pack(*prompt), tokens, SIZE * found, SIZE, session),
        BlocksStored(pack(*keys[found:]), parent, SIZE),
        RequestFinished(name, whole, tokens, SIZE * len(keys), "stop", session),
    ]


def told(tips: bool, session: str | None) -> KVCacheGraph:
    now = [1000.0]
    graph = KVCacheGraph(clock=lambda: now[0])
    graph.apply("e", [EngineHello("e", "m", SIZE, 10_000, "v")])
    for number, (length, found) in enumerate([(700, 0), (900, 700), (1600, 900)]):
        now[0] += 1
        events = turn(number, range(1, length + 1), found, session)
        graph.apply("e", [as_tip(event) for event in events] if tips else events)
        graph.check_integrity()
    return graph


@pytest.mark.parametrize("session", ["s", None])
def test_a_session_told_by_tips_has_the_same_turns_and_the_same_end(session: str | None) -> None:
    chains, tips = told(False, session), told(True, session)
    assert tips.counters["tips_unknown"] == 0
    for name in ("turns", "tokens", "tip", "running", "state"):
        ours, theirs = (getattr(each.tables.sessions, name)[0] for each in (tips, chains))
        assert ours == theirs, name
    rows = tips.tables.blocks.find(np.arange(1, 1601, dtype=np.uint64), tips.tables.salt(0))
    blocks, others = tips.tables.blocks, chains.tables.blocks
    same = others.find(np.arange(1, 1601, dtype=np.uint64), chains.tables.salt(0))
    for name in ("depth", "hit_count", "session", "tokens"):
        assert (getattr(blocks, name)[rows] == getattr(others, name)[same]).all(), name


def test_a_tip_is_one_key_long() -> None:
    started, stored, finished = turn(0, range(1, 101), 40, "s")
    tip, same, end = as_tip(started), as_tip(stored), as_tip(finished)
    assert (tip.hashes, tip.skipped) == (pack(40), 39)  # type: ignore[union-attr]
    assert (end.hashes, end.skipped) == (pack(100), 99)  # type: ignore[union-attr]
    assert same is stored
    fresh = as_tip(turn(0, range(1, 101), 0, "s")[0])
    assert (fresh.hashes, fresh.skipped) == (b"", 0)  # type: ignore[union-attr]


def test_a_start_that_says_what_its_blocks_are_is_told_whole() -> None:
    started, *_ = turn(0, range(1, 101), 40, "s")
    tagged = msgspec.structs.replace(started, segments=(Segment(0, 0, 160),))
    assert as_tip(tagged) is tagged


def test_what_a_tip_leaves_out_is_not_taken_for_left_behind() -> None:
    graph = KVCacheGraph()
    for number, found in enumerate((0, 40)):
        graph.apply("e", [as_tip(each) for each in turn(number, range(1, 101), found, "s")])
    assert graph.counters["blocks_superseded"] == 0


def test_a_tip_of_a_chain_that_is_not_known_tells_of_no_block() -> None:
    graph = KVCacheGraph()
    graph.apply("e", [BlocksStored(pack(5, 6), None, SIZE)])
    for tip in (6, 7):
        end = RequestFinished(f"r{tip}", pack(tip), 64, 80, "stop", "s", skipped=4)
        graph.apply("e", [end])
    graph.check_integrity()
    assert graph.counters["tips_unknown"] == 2
    assert len(graph.tables.blocks) == 2
    assert graph.tables.sessions.rows_named("s") == [0]


def test_what_is_new_is_found_behind_what_was_skipped() -> None:
    graph = KVCacheGraph()
    graph.apply("e", turn(0, range(1, 101), 0, "s"))
    graph.apply(
        "e", [RequestStarted("r", pack(98, 200, 201), 101 * 16, 98 * 16, 16, "s", skipped=97)]
    )
    graph.check_integrity()
    row = int(graph.tables.blocks.find(np.array([201], dtype=np.uint64))[0])
    assert graph.tables.blocks.depth[row] == 99
