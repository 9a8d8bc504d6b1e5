"""Sessions that nobody names: whose turn a request is, told from its blocks."""

from __future__ import annotations

import random
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvgraph.advisor.replay.fleet_traffic import Signals, lay_over_users, trace_lines, write_trace
from kvgraph.advisor.replay.reader import infer_sessions, load_trace
from kvgraph.advisor.replay.recorded_sessions import read_sessions
from kvgraph.graph import snapshot
from kvgraph.graph.errors import SnapshotError
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.tables.blocks import Selection
from kvgraph.graph.tables.tables import GraphLimits
from kvgraph.graph.types import EdgeType, Tier, as_keys
from kvgraph.graph.wire.events import (
    BlocksAttended,
    Segment,
)
from kvgraph_bench.recorded.agents_requests import SESSIONS
from turns import Told, dropped, finished, removed, spilled, started, stored
from wire_keys import pack


class Traffic(Told):
    """Requests without a name; a key stands for its whole prefix."""

    def __init__(self) -> None:
        super().__init__(now=0.0)
        self._numbers = count()

    def begin(self, *keys: int, engine: str = "e", request: str = "", **said: Any) -> str:
        self.now += 1.0
        request = request or f"r{next(self._numbers)}"
        self.tell(started(request, *keys, **said), engine=engine)
        return request

    def end(self, request: str, *keys: int, engine: str = "e", **said: Any) -> None:
        self.tell(finished(request, *keys, **said), engine=engine)

    def asks(self, *keys: int, tenant: str | None = None) -> str:
        """A request comes and ends; the session that it is taken for."""
        self.end(self.begin(*keys, tenant=tenant), *keys)
        return self.session(keys[-1])

    def session(self, key: int) -> str:
        return str(self.graph.explain(key)["session"])

    def superseded(self, *keys: int) -> list[bool]:
        return [bool(self.graph.explain(key)["superseded"]) for key in keys]


@pytest.fixture
def traffic() -> Traffic:
    return Traffic()


def test_requests_of_one_id_on_two_engines_are_two(traffic: Traffic) -> None:
    traffic.begin(1, 2, 3, request="same")
    traffic.begin(11, 12, 13, engine="f", request="same")
    first, second = traffic.session(3), traffic.session(13)
    assert first != second
    traffic.end("same", 1, 2, 3)
    traffic.end("same", 11, 12, 13, engine="f")
    sessions = traffic.graph.tables.sessions
    assert sessions.running[: sessions.size].tolist() == [0, 0]
    assert traffic.asks(1, 2, 3, 4) == first
    assert traffic.asks(11, 12, 13, 14) == second


def test_requests_of_an_engine_that_is_gone_end_no_more(traffic: Traffic) -> None:
    traffic.begin(1, 2, 3, request="same")
    traffic.graph.forget_engine("e")
    traffic.graph.apply("f", [])
    assert traffic.graph.tables.engines == {"f": 0}
    traffic.end("same", 11, 12, engine="f")
    assert traffic.session(12) == "None"


def test_a_compacted_history_leaves_its_old_branch_behind(traffic: Traffic) -> None:
    """Also where nobody names the session."""
    first = traffic.asks(1, 2)
    assert traffic.asks(1, 2, 3, 4, 5) == first
    assert traffic.asks(1, 2, 3, 6) == first
    assert traffic.superseded(1, 2, 3, 4, 5, 6) == [False, False, False, True, True, False]


@pytest.mark.parametrize(
    ("system", "first"),
    [
        pytest.param(2, (3, 3, 1), id="of any length"),
        pytest.param(2, (6, 6, 6, 6), id="of equal length"),
        pytest.param(10, (2, 2, 2), id="short ones under a long system prompt"),
    ],
)
def test_chats_that_share_a_system_prompt_are_told_apart(
    traffic: Traffic, system: int, first: tuple[int, ...]
) -> None:
    """Also where each adds less to it than it is long: what one says leaves no other behind."""
    shared = range(1, system + 1)
    chats = [[*shared, *range(100 * n, 100 * n + own)] for n, own in enumerate(first, 1)]
    begun = [traffic.asks(*chat) for chat in chats]
    assert len(set(begun)) == len(chats)
    for turn in range(10, 15):
        for number, (chat, name) in enumerate(zip(chats, begun, strict=True), 1):
            chat.append(100 * number + turn)
            assert traffic.asks(*chat) == name
    assert not any(traffic.superseded(*(key for chat in chats for key in chat)))


def test_chats_that_differ_in_one_block_are_told_apart_once_one_returns(traffic: Traffic) -> None:
    first = traffic.asks(1, 2, 3)
    assert traffic.asks(1, 2, 3, 10) == first
    assert traffic.asks(1, 2, 3, 20) == first, "it may be the same prompt, with another end"
    other = traffic.asks(1, 2, 3, 10, 11)
    assert other != first
    assert traffic.asks(1, 2, 3, 20, 21) == first
    assert traffic.asks(1, 2, 3, 10, 11, 12) == other
    assert traffic.superseded(1, 2, 3, 10, 11, 20, 21) == [False] * 7


HISTORY = range(1, 41)


def grown(traffic: Traffic, turns: int = 5) -> str:
    """A session of some turns, with ``HISTORY``."""
    return [traffic.asks(*HISTORY[:end]) for end in (25, 30, 34, 37, 40)[-turns:]][-1]


def test_a_summary_takes_the_place_of_a_history_that_was_near_to_full(traffic: Traffic) -> None:
    first = grown(traffic)
    assert traffic.asks(1, 2, 3, 101, 102, 103) == first
    assert traffic.superseded(3, 4, 40) == [False, True, True]
    assert traffic.asks(1, 2, 3, 101, 102, 103, 104) == first


@pytest.mark.parametrize(
    ("prompt", "longest", "turns"),
    [
        pytest.param((1, 2, 3, 101), 40, 5, id="a subagent, with a task of a few words"),
        pytest.param((1, 2, 3, *range(101, 131)), 40, 5, id="neither as long, nor a summary"),
        pytest.param((1, 2, 3, 101, 102, 103), 80, 5, id="a summary, but there was room left"),
        pytest.param((1, 2, 3, 101, 102, 103), 40, 4, id="a summary, but after few turns"),
    ],
)
def test_what_begins_beside_a_session_supersedes_nothing(
    traffic: Traffic, prompt: tuple[int, ...], longest: int, turns: int
) -> None:
    traffic.asks(*range(1001, 1001 + longest))
    first = grown(traffic, turns)
    assert traffic.asks(*prompt) != first
    assert traffic.superseded(4, 5, 40) == [False] * 3
    assert traffic.asks(*HISTORY, 41) == first


def test_a_side_question_under_a_chats_name_leaves_the_chat_as_it_was(traffic: Traffic) -> None:
    """As a title that is asked for, or a subagent for which its session waits."""

    def asks(*keys: int, name: str = "chat") -> None:
        traffic.end(traffic.begin(*keys, session=name), *keys, session=name)

    asks(*range(1, 9))
    for questions in ([(101, 102, 103, 104)], [(201,), (301, 302), (301, 302, 303)]):
        for question in questions:
            asks(*question)
            assert not any(traffic.superseded(*range(1, 9), *question))
        asks(*range(1, 10))
        assert traffic.superseded(1, 9, *questions[-1]) == [False] * 2 + [True] * len(question)
    asks(*range(401, 406))
    assert traffic.superseded(1, 9) == [True, True], "it is another version of the chat"


def test_a_chat_goes_on_beside_a_question_that_runs(traffic: Traffic) -> None:
    asked = traffic.begin(*range(1, 9), session="chat")
    traffic.end(traffic.begin(101, session="chat"), 101, session="chat")
    traffic.end(asked, *range(1, 9), session="chat")
    traffic.begin(102, session="chat")
    assert not any(traffic.superseded(*range(1, 9)))


def test_another_tenants_request_continues_nothing(traffic: Traffic) -> None:
    first = traffic.asks(1, 2, 3, tenant="a")
    assert traffic.asks(1, 2, 3, 4, tenant="b") != first


def test_a_request_beside_a_running_one_is_a_session_of_its_own(traffic: Traffic) -> None:
    first = traffic.asks(1, 2, 3)
    running = traffic.begin(1, 2, 3, 4)
    assert traffic.session(4) == first
    other = traffic.asks(1, 2, 3, 5)
    assert other != first
    traffic.end(running, 1, 2, 3, 4, 6, prompt=4)
    assert traffic.asks(1, 2, 3, 4, 6, 7) == first
    assert traffic.asks(1, 2, 3, 5, 8) == other


def test_two_branches_that_both_go_on_are_two_sessions(traffic: Traffic) -> None:
    """The first look at a second branch is that of an edited history; then both are alive."""
    traffic.asks(1, 2, 3)
    left = traffic.asks(1, 2, 3, 4, 10)
    traffic.asks(1, 2, 3, 4, 20)
    back = traffic.asks(1, 2, 3, 4, 10, 11)
    right = traffic.session(20)
    assert back != right == left
    for step in range(3):
        assert traffic.asks(1, 2, 3, 4, 10, 11, *range(100, 101 + step)) == back
        assert traffic.asks(1, 2, 3, 4, 20, *range(200, 201 + step)) == right
    assert traffic.superseded(10, 11, 100, 20, 200) == [False] * 5


@pytest.mark.parametrize("seed", [836310264, 298000757, 427111572, None])
def test_live_and_lab_tell_sessions_apart_alike(seed: int | None) -> None:
    seed = random.randrange(1 << 30) if seed is None else seed
    print(f"seed {seed}")  # noqa: T201 - shown when the test fails
    rng, traffic, fresh = random.Random(seed), Traffic(), count(100)
    talks: list[list[int]] = [[1, 2, 3]]
    chains = []
    for _ in range(300):
        if rng.random() < 0.1:
            talks.append([1, 2])
        talk = rng.randrange(len(talks))
        kept = talks[talk][: rng.choice([999, 999, rng.randrange(1, len(talks[talk]) + 1)])]
        talks[talk] = kept + [next(fresh) for _ in range(rng.randrange(1, 4))]
        chains.append(talks[talk])
    live = [traffic.asks(*chain) for chain in chains]
    lab = infer_sessions(chains, [len(chain) for chain in chains], next(fresh)).tolist()
    assert _numbered(live) == _numbered(lab)
    assert 10 < len(set(lab)) < 250


def _numbered(names: list[object]) -> list[int]:
    order = list(dict.fromkeys(names))
    return [order.index(name) for name in names]


def test_recorded_sessions_are_told_apart_by_their_blocks_alone(tmp_path: Path) -> None:
    """Each request is taken for the next of the one before it in its session, nearly always."""
    requests = lay_over_users(read_sessions(SESSIONS), 20, 2 * 3600.0, 3)
    write_trace(trace_lines(requests, 512, Signals.NONE, 3), tmp_path / "fleet.jsonl")
    trace = load_trace(tmp_path / "fleet.jsonl")
    inferred = infer_sessions(trace.chains(), trace.full.tolist(), trace.num_blocks)
    named, told = _before(trace.session.tolist()), _before(inferred.tolist())
    wrong = [(a, b) for a, b in zip(named, told, strict=True) if a != b]
    assert len(wrong) < 0.015 * len(trace)
    merged = sum(b is not None for _, b in wrong)
    assert merged < 0.003 * len(trace), "another's turn supersedes what is alive"


def _before(sessions: list[int]) -> list[int | None]:
    """The request before each one in its session."""
    last: dict[int, int] = {}
    before = []
    for request, session in enumerate(sessions):
        before.append(last.get(session))
        last[session] = request
    return before


TEMPORAL = EdgeType.TEMPORAL


def walked(*keys: int, segments: tuple[Segment, ...] = (), **options: Any) -> KVCacheGraph:
    """A graph in which two sessions walked these blocks."""
    graph = KVCacheGraph(**options)
    for session in "rq":
        graph.apply("e", [started(session, *keys, more=1, session=session, segments=segments)])
    return graph


def busy_graph() -> KVCacheGraph:
    """A graph with edges of five types."""
    graph = walked(1, 2, 3, segments=(Segment(5, 0, 16, memory_id="m"),), clock=lambda: 50.0)
    mass = np.ones(2, dtype="<f4").tobytes()
    graph.apply("e", [stored(1, 2, 3)])
    graph.apply("e", [BlocksAttended(pack(1, 3), mass)] * 3)
    graph.apply("e", [spilled(2, 3), spilled(3, tier=4)])
    return graph


def test_edges_that_follow_from_columns_are_not_stored_and_seen_all_the_same() -> None:
    graph = busy_graph()
    expected = {"prefix_share": 3, "co_attend": 1, "semantic": 0, "temporal": 2, "memory_ref": 1}
    assert graph.stats().edges == {**expected, "spill_link": 3}
    assert len(graph.tables.edges) == 2
    graph.check_integrity()
    assert sorted((each["type"], each["weight"]) for each in graph.neighbors(3)) == [
        ("co_attend", 3.0),
        ("prefix_share", 2.0),
        ("spill_link", 1.0),
        ("spill_link", 1.0),
        ("temporal", 1.0),
    ]
    graph.apply("e", [dropped(3, tier=4)])
    assert graph.stats().edges["spill_link"] == 2


def test_the_sums_at_a_block_are_those_of_its_edges() -> None:
    graph = busy_graph()
    everything = graph.tables.all_edges
    for row in graph.tables.blocks.live_rows().tolist():
        only = Selection(graph.tables.blocks, np.array([row], dtype=np.int32))
        at = everything.touching(only.rows)
        for kind in EdgeType:
            weights = at.weight[at.kind == int(kind)]
            assert everything.degree(kind, only).tolist() == [len(weights)], kind
            assert everything.weight(kind, only).tolist() == [weights.sum()], kind


@pytest.mark.parametrize(("again", "linked"), [((1, 2), [2, 7, 8]), ((), [5, 6, 7, 8])])
def test_links_of_forgotten_blocks_are_gone(again: tuple[int, ...], linked: list[int]) -> None:
    """Three blocks of a chain are forgotten, the longest unused: from its start, or behind it."""
    now = [0.0]
    graph = walked(*range(1, 9), limits=GraphLimits(max_ghosts=8), clock=lambda: now[0])
    now[0] = 1.0
    if again:
        graph.apply("e", [started("w", *again, session="w")])
    graph.apply("e", [stored(9), removed(9)])
    graph.check_integrity()
    assert len(graph.tables.blocks) == 6
    followed = [edge.target for edge in graph.tables.all_edges.all() if edge.kind == TEMPORAL]
    assert sorted(graph.tables.blocks.keys[followed].tolist()) == linked
    assert graph.stats().edges["prefix_share"] == len(linked) + len(again) // 2


def test_blocks_that_only_a_store_has_are_forgotten_like_others() -> None:
    graph = KVCacheGraph(limits=GraphLimits(max_ghosts=8), clock=lambda: 0.0)
    keys = tuple(range(1, 13))
    for engine in ("e", "other"):
        whole = stored(*keys)
        graph.apply(engine, [whole, spilled(*keys, tier=Tier.POOL)])
        graph.apply(engine, [removed(*keys)])
    graph.apply("e", [stored(21, 22, 23)])
    assert len(graph.tables.blocks) == 9, "six of the twelve are remembered"
    graph.check_integrity()
    graph.apply("e", [stored(24)])  # in a row that was one of theirs
    assert "store" not in graph.explain(24)["copies"]
    graph.check_integrity()


def test_a_snapshot_that_stored_derived_edges_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "graph.snap"
    snapshot.save(busy_graph(), path)
    current = path.read_bytes()
    path.write_bytes(b"KVGSNAP\x07" + current[8:])
    with pytest.raises(SnapshotError, match="not a snapshot of this version"):
        snapshot.load(KVCacheGraph(), path)
    path.write_bytes(current)
    back = KVCacheGraph(clock=lambda: 7.0)
    snapshot.load(back, path)
    before = busy_graph().stats().edges
    assert back.stats().edges == {**before, "spill_link": 0}, "copies are an engine's to announce"


def shares(graph: KVCacheGraph, key: int) -> list[tuple[str, str, float]]:
    """The PREFIX_SHARE edges at a block: direction, other node, weight."""
    at = [each for each in graph.neighbors(key) if each["type"] == "prefix_share"]
    return [(each["direction"], each["node"], each["weight"]) for each in at]


def test_the_first_block_of_a_chain_is_linked_to_the_root_once_two_walked_it() -> None:
    graph = KVCacheGraph()
    for session, found in (("r", []), ("q", [("in", "root", 2.0)])):
        graph.apply("e", [started(session, 1, session=session)])
        assert shares(graph, 1) == found
    first = Selection(graph.tables.blocks, graph.tables.blocks.find(as_keys([1])))
    assert graph.tables.all_edges.degree(EdgeType.PREFIX_SHARE, first).tolist() == [1]
    assert graph.tables.all_edges.weight(EdgeType.PREFIX_SHARE, first).tolist() == [2]
    # Its hash is of all that stands before it: who says something else later contradicts it.
    graph.apply("e", [stored(1, behind=9)])
    graph.check_integrity()
    assert shares(graph, 1) == [("in", "root", 2.0)]
    assert graph.counters["links_refused"] == 1


def test_copies_and_memories_are_not_taken_for_the_root() -> None:
    """Their numbers may be equal to the row that they are of."""
    graph, memory = KVCacheGraph(), Segment(5, 0, 16, memory_id="m")
    graph.apply("e", [started("r", 1, segments=(memory,)), spilled(1)])
    found = {(each["direction"], each["node"]) for each in graph.neighbors(1)}
    assert found == {("out", "memory:m"), ("out", f"copy:warm:{1:#018x}")}
