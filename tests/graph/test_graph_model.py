"""Random event sequences against a graph made of plain dicts and sets."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.messages.advice import EvictionRanking
from kvgraph.graph.messages.events import (
    BlocksAttended,
    BlocksCleared,
    BlocksLoaded,
    BlocksRemoved,
    BlocksResident,
    BlocksSpilled,
    BlocksStored,
    CopiesDropped,
    RequestFinished,
    RequestStarted,
    Segment,
    SessionSignal,
)
from kvgraph.graph.types import (
    DEFAULT_IMPORTANCE,
    EDGE_NAMES,
    NO_ROW,
    PROTECTED_LAYERS,
    BlockFlag,
    SessionState,
    SourceLayer,
    Tier,
)

SIZE = 16
ENGINES = ("one", "two")
# A tree of prompts: key → parent. Keys 1.. form three branches below a shared stem.
PARENT: dict[int, int | None] = {1: None, 2: 1, 3: 2}
for branch in range(3):
    for step in range(6):
        key = 10 * (branch + 1) + step
        PARENT[key] = 3 if step == 0 else key - 1
PARENT[90] = None
KEYS = sorted(PARENT)


def chain(key: int) -> list[int]:
    """From the start of the prompt to ``key``."""
    path: list[int] = []
    at: int | None = key
    while at is not None:
        path.append(at)
        at = PARENT[at]
    return path[::-1]


def pack(keys: list[int]) -> bytes:
    return np.array(keys, dtype="<u8").tobytes()


@dataclass
class NaiveBlock:
    parent: int | None = None
    layer: int = SourceLayer.USER_TURN
    importance: float = float(DEFAULT_IMPORTANCE[SourceLayer.USER_TURN])
    hits: int = 0
    walkers: int = 0
    session: str | None = None
    shared: bool = False
    superseded: bool = False
    tiers: dict[str, int] = field(default_factory=dict)


@dataclass
class NaiveSession:
    state: SessionState = SessionState.IDLE
    turns: int = 0
    running: int = 0
    engine: str = ""
    tip: int | None = None
    reach: int = 0


class NaiveGraph:
    """What the events mean, said as simply as possible."""

    def __init__(self) -> None:
        self.blocks: dict[int, NaiveBlock] = {}
        self.edges: dict[tuple[str, Any, Any], float] = {}
        self.sessions: dict[str, NaiveSession] = {}
        self.pairs: dict[tuple[int, int], int] = {}
        self.inferred: dict[str, str] = {}
        self.swept: float | None = None
        self.known_size: set[int] = set()  # keys whose block size an event stated

    def block(self, key: int) -> NaiveBlock:
        return self.blocks.setdefault(key, NaiveBlock())

    def link(self, key: int, parent: int) -> None:
        if self.block(key).parent is None:
            self.block(key).parent = parent
            self.edges["temporal", parent, key] = 1.0

    def lay(self, keys: list[int]) -> None:
        for key in keys:
            self.block(key)
        for parent, key in pairwise(keys):
            self.link(key, parent)

    def apply(self, engine: str, event: Any, now: float) -> None:
        keys = np.frombuffer(getattr(event, "hashes", b""), "<u8").tolist()
        match event:
            case BlocksStored():
                if event.parent is not None:
                    self.block(event.parent)
                self.lay(([] if event.parent is None else [event.parent]) + keys)
                for key in keys:
                    self.set_tier(engine, key, Tier.HOT)
                    if event.session and self.block(key).session is None:
                        self.session(event.session)
                        self.block(key).session = event.session
                if event.session:
                    self.session(event.session)
            case BlocksRemoved():
                self.clear_tier(engine, keys, Tier.HOT)
            case BlocksCleared():
                self.clear_tier(engine, list(self.blocks), Tier.HOT)
            case BlocksResident():
                for tier in (Tier.HOT, Tier.WARM, Tier.COLD):
                    self.clear_tier(engine, list(self.blocks), tier)
                for key in keys:
                    self.set_tier(engine, key, Tier.HOT)
            case BlocksSpilled():
                for key in keys:
                    self.set_tier(engine, key, Tier(event.tier))
                    self.edges["spill_link", key, (key, event.tier)] = 1.0
            case CopiesDropped():
                self.clear_tier(engine, keys, Tier(event.tier))
            case BlocksLoaded():
                for key in keys:
                    self.set_tier(engine, key, Tier.HOT)
            case BlocksAttended():
                self.attend([key for key in keys if key in self.blocks], now)
            case RequestStarted():
                self.start(engine, event, keys)
            case RequestFinished():
                self.finish(event, keys)
            case SessionSignal():
                if event.session in self.sessions:
                    self.signal(self.session(event.session), event.ended, event.waiting_for_tool)

    def set_tier(self, engine: str, key: int, tier: Tier) -> None:
        tiers = self.block(key).tiers
        tiers[engine] = tiers.get(engine, 0) | tier

    def clear_tier(self, engine: str, keys: list[int], tier: Tier) -> None:
        for key in filter(self.blocks.__contains__, keys):
            tiers = self.blocks[key].tiers
            tiers[engine] = tiers.get(engine, 0) & ~tier
        self.unlink_lost_copies()

    def unlink_lost_copies(self) -> None:
        for kind, key, target in list(self.edges):
            if kind == "spill_link" and not any(
                bits & target[1] for bits in self.blocks[key].tiers.values()
            ):
                del self.edges[kind, key, target]

    def forget(self, engine: str) -> None:
        for block in self.blocks.values():
            block.tiers.pop(engine, None)
        for session in self.sessions.values():
            if session.running and session.engine == engine:
                session.running, session.state = 0, SessionState.IDLE
        self.unlink_lost_copies()

    def attend(self, keys: list[int], now: float) -> None:
        self.swept = now if self.swept is None else self.swept
        if now - self.swept >= 60:
            factor = 0.5 ** ((now - self.swept) / 300)
            for edge in [edge for edge in self.edges if edge[0] == "co_attend"]:
                self.edges[edge] *= factor
            self.swept = now
        for a in keys:
            for b in keys:
                if a < b:
                    self.attend_pair(a, b)

    def attend_pair(self, a: int, b: int) -> None:
        if ("co_attend", a, b) in self.edges:
            self.edges["co_attend", a, b] += 1
            return
        self.pairs[a, b] = self.pairs.get((a, b), 0) + 1
        if self.pairs[a, b] == 3:
            self.edges["co_attend", a, b] = float(self.pairs.pop((a, b)))

    def session(self, name: str) -> NaiveSession:
        return self.sessions.setdefault(name, NaiveSession())

    def start(self, engine: str, event: RequestStarted, keys: list[int]) -> None:
        self.lay(keys)
        for key in keys[: event.cached_tokens // SIZE]:
            self.block(key).hits += 1
        for key in keys:
            block = self.block(key)
            block.walkers += 1
            if block.walkers >= 2:  # the first of a chain is linked to the root, written as itself
                before = key if block.parent is None else block.parent
                self.edges["prefix_share", before, key] = block.walkers
        self.tag(event, keys)
        name = event.session or self.infer(event, keys)
        session = self.session(name)
        for key in keys:
            self.block(key).superseded = False
        if session.running == 0:
            self.supersede(name, session.tip, keys)
            session.turns += 1
        self.own(name, keys)
        session.running += 1
        session.engine = engine
        session.reach = len(keys)
        session.state = SessionState.RUNNING
        self.mark_tip(name, keys)

    def tag(self, event: RequestStarted, keys: list[int]) -> None:
        whole = [segment for segment in event.segments if segment.start < segment.end]
        for segment in sorted(whole, key=lambda each: -each.layer):
            for key in keys[segment.start // SIZE : -(-segment.end // SIZE)]:
                block = self.block(key)
                block.layer = segment.layer
                default = float(DEFAULT_IMPORTANCE[segment.layer])
                block.importance = default if segment.importance is None else segment.importance
                if segment.memory_id:
                    self.edges["memory_ref", key, segment.memory_id] = block.importance

    def infer(self, event: RequestStarted, keys: list[int]) -> str:
        name = self.continued(keys)
        if name is None:
            name = f"~{event.request_id}"
            self.session(name)
            for key in keys:
                if self.block(key).superseded:
                    self.block(key).session = name
        self.inferred[event.request_id] = name
        return name

    def continued(self, keys: list[int]) -> str | None:
        seen = list(itertools.takewhile(lambda key: self.block(key).session is not None, keys))
        if not seen or self.block(seen[-1]).shared:
            return None
        name = self.block(seen[-1]).session
        session = self.sessions[name or ""]
        left_behind = any(self.block(key).superseded for key in keys)
        kept = 2 * len(seen) > session.reach or (
            session.turns >= 5 and self.compacts(len(seen), len(keys), session.reach)
        )
        return name if kept and not session.running and not left_behind else None

    def compacts(self, known: int, blocks: int, before: int) -> bool:
        full = before * 4 >= 3 * max(each.reach for each in self.sessions.values())
        return full and 2 * blocks <= before and (blocks - known) * 20 >= before

    def supersede(self, name: str, tip: int | None, keys: list[int]) -> None:
        while tip is not None and tip not in keys:
            block = self.blocks[tip]
            if block.session == name and not block.shared:
                block.superseded = True
            tip = block.parent

    def own(self, name: str, keys: list[int]) -> None:
        for key in keys:
            block = self.block(key)
            block.shared |= block.session not in (None, name)
            block.session = name

    def mark_tip(self, name: str, keys: list[int]) -> None:
        self.sessions[name].tip = keys[-1]

    def finish(self, event: RequestFinished, keys: list[int]) -> None:
        inferred = self.inferred.pop(event.request_id, None)
        sized = self.blocks.get(keys[0]) is not None and self.sized(keys[0])
        self.lay(keys)
        written = keys[event.prompt_tokens // SIZE :] if sized else keys
        for key in written:
            block = self.block(key)
            if block.walkers == 0:
                block.layer = SourceLayer.GENERATION
                block.importance = float(DEFAULT_IMPORTANCE[SourceLayer.GENERATION])
        name = event.session or inferred
        if name is None:
            return
        session = self.session(name)
        self.own(name, keys)
        self.mark_tip(name, keys)
        session.running = max(0, session.running - 1)
        if session.running == 0:
            session.state = SessionState.IDLE
        self.signal(session, event.session_ended, event.waiting_for_tool)

    def sized(self, key: int) -> bool:
        return key in self.known_size

    def signal(self, session: NaiveSession, ended: bool, waiting: bool) -> None:
        if session.running:
            return
        if ended:
            session.state = SessionState.ENDED
        elif waiting:
            session.state = SessionState.WAITING_FOR_TOOL


keys_of_tree = st.sampled_from(KEYS)
sessions = st.sampled_from(["s", "t", None])
returns = st.sampled_from([None, 1.0, 60.0])
some_keys = st.lists(keys_of_tree, min_size=1, max_size=6, unique=True).map(sorted)


@st.composite
def stored(draw: st.DrawFn) -> BlocksStored:
    path = chain(draw(keys_of_tree))
    start = draw(st.integers(0, len(path) - 1))
    parent = path[start - 1] if start else None
    return BlocksStored(pack(path[start:]), parent, SIZE, draw(sessions))


@st.composite
def started(draw: st.DrawFn) -> RequestStarted:
    path = chain(draw(keys_of_tree))
    tokens = len(path) * SIZE
    segments = draw(st.lists(segment(tokens), max_size=2))
    return RequestStarted(
        f"r{draw(st.integers(0, 3))}", pack(path), tokens, draw(st.integers(0, tokens)), SIZE,
        draw(sessions), None, tuple(segments),
    )  # fmt: skip


@st.composite
def segment(draw: st.DrawFn, tokens: int) -> Segment:
    start = draw(st.integers(0, tokens))
    end = draw(st.integers(start, tokens))
    importance = draw(st.one_of(st.none(), st.sampled_from([0.0, 0.5, 1.0])))
    memory = draw(st.sampled_from([None, "m1", "m2"]))
    if start == end:
        memory = None
    return Segment(draw(st.integers(0, 9)), start, end, importance, None, memory)


@st.composite
def finished(draw: st.DrawFn) -> RequestFinished:
    path = chain(draw(keys_of_tree))
    prompt = draw(st.integers(0, len(path))) * SIZE
    return RequestFinished(
        f"r{draw(st.integers(0, 3))}", pack(path), prompt, len(path) * SIZE, "stop",
        draw(sessions), None, draw(st.booleans()), draw(returns), draw(st.booleans()),
    )  # fmt: skip


colder = st.sampled_from([2, 4])
events = st.one_of(
    stored(),
    stored(),
    started(),
    finished(),
    some_keys.map(lambda keys: BlocksRemoved(pack(keys))),
    some_keys.map(lambda keys: BlocksRemoved(pack(keys))),
    some_keys.map(lambda keys: BlocksResident(pack(keys))),
    some_keys.map(lambda keys: BlocksLoaded(pack(keys))),
    some_keys.map(lambda keys: BlocksAttended(pack(keys), b"\0\0\x80\x3f" * len(keys))),
    st.builds(lambda keys, tier: BlocksSpilled(pack(keys), tier, 100), some_keys, colder),
    st.builds(lambda keys, tier: CopiesDropped(pack(keys), tier), some_keys, colder),
    st.just(BlocksCleared()),
    st.builds(
        SessionSignal, st.sampled_from("st"), st.none(), st.booleans(), returns, st.booleans()
    ),
)  # fmt: skip
steps = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(ENGINES), st.lists(events, min_size=1, max_size=6)),
        # Turns that follow each other are applied as one vector.
        st.tuples(
            st.sampled_from(ENGINES),
            st.lists(st.one_of(started(), finished()), min_size=2, max_size=8),
        ),
        st.tuples(st.just("forget"), st.sampled_from(ENGINES)),
        st.tuples(st.just("sleep"), st.sampled_from([1.0, 45.0])),
    ),
    max_size=25,
)


@settings(max_examples=300, deadline=None)
@given(steps)
def test_columns_and_dicts_agree_on_every_event_sequence(script: list[tuple[str, Any]]) -> None:
    now = [1000.0]
    graph, naive = KVCacheGraph(clock=lambda: now[0]), NaiveGraph()
    for subject, action in script:
        if subject == "forget":
            if action in graph.engines:
                naive.forget(action)
            graph.forget_engine(action)
        elif subject == "sleep":
            now[0] += action
        else:
            graph.apply(subject, action)
            for event in action:
                naive.apply(subject, event, now[0])
                if isinstance(event, BlocksStored | RequestStarted):
                    naive.known_size |= set(np.frombuffer(event.hashes, "<u8").tolist())
        graph.check_integrity()
    compare(graph, naive)
    check_rankings(graph)


def compare(graph: KVCacheGraph, naive: NaiveGraph) -> None:
    assert blocks_of(graph) == {
        key: (
            block.parent, block.layer, pytest.approx(block.importance), block.hits, block.walkers,
            block.session, block.shared, block.superseded,
            {engine: bits for engine, bits in block.tiers.items() if bits},
        )
        for key, block in naive.blocks.items()
    }  # fmt: skip
    assert edges_of(graph) == {
        edge: pytest.approx(weight, rel=1e-4) for edge, weight in naive.edges.items()
    }
    assert sessions_of(graph) == {
        name: (session.state, session.turns, session.running, session.tip)
        for name, session in naive.sessions.items()
    }


def blocks_of(graph: KVCacheGraph) -> dict[int, tuple[Any, ...]]:
    blocks, sessions = graph.tables.blocks, graph.tables.sessions
    found = {}
    for row in blocks.live_rows().tolist():
        parent, session = int(blocks.parent[row]), int(blocks.session[row])
        tiers = {name: int(blocks.tiers[e, row]) for name, e in graph.tables.engines.items()}
        found[int(blocks.keys[row])] = (
            None if parent == NO_ROW else int(blocks.keys[parent]),
            int(blocks.layer[row]), float(blocks.importance[row]),
            int(blocks.hit_count[row]), int(blocks.walkers[row]),
            None if session == NO_ROW else sessions.names[session],
            bool(blocks.flags[row] & BlockFlag.SHARED),
            bool(blocks.flags[row] & BlockFlag.SUPERSEDED),
            {name: bits for name, bits in tiers.items() if bits},
        )  # fmt: skip
    return found


def edges_of(graph: KVCacheGraph) -> dict[tuple[str, Any, Any], float]:
    keys = graph.tables.blocks.keys
    found = {}
    for edge in graph.tables.all_edges.all():
        kind, source, node = EDGE_NAMES[edge.kind], int(keys[edge.source]), edge.target
        target: Any = int(keys[node]) if kind not in ("spill_link", "memory_ref") else node
        if kind == "spill_link":
            target = (int(keys[node >> 1]), 4 if node & 1 else 2)
        if kind == "memory_ref":
            target = graph.tables.memories.name(node)
        if kind == "co_attend":
            source, target = sorted((source, target))
        found[kind, source, target] = edge.weight
    return found


def sessions_of(graph: KVCacheGraph) -> dict[str, tuple[Any, ...]]:
    sessions, keys = graph.tables.sessions, graph.tables.blocks.keys
    return {
        name: (
            SessionState(int(sessions.state[row])), int(sessions.turns[row]),
            int(sessions.running[row]),
            None if sessions.tip[row] == NO_ROW else int(keys[sessions.tip[row]]),
        )
        for row, name in enumerate(sessions.names)
    }  # fmt: skip


def check_rankings(graph: KVCacheGraph) -> None:
    """Every resident block is ranked once, protected ones apart, children before parents."""
    blocks = graph.tables.blocks
    for engine, column in graph.tables.engines.items():
        ranking = graph.rank(engine, 1000)
        ranked = ranking.order.tolist() + ranking.protected.tolist()
        resident = blocks.keys[: blocks.size][blocks.resident(column)].tolist()
        assert sorted(ranked) == sorted(resident)
        place = {key: position for position, key in enumerate(ranked)}
        layers = {key: blocks.layer[blocks.find(np.array([key], np.uint64))[0]] for key in ranked}
        assert not {layers[key] for key in ranking.order.tolist()} & PROTECTED_LAYERS
        for key in ranked:
            parent = PARENT[key]
            linked = blocks.parent[blocks.find(np.array([key], np.uint64))[0]] != NO_ROW
            if linked and parent in place:
                assert place[key] < place[parent], f"{key} would be stranded by {parent}"
        check_copies(graph, column, set(ranked), ranking)


def check_copies(graph: KVCacheGraph, column: int, hot: set[int], ranking: EvictionRanking) -> None:
    """Spills name blocks without a copy, in the order in which they go; demotes every idle copy."""
    blocks = graph.tables.blocks
    keys, tiers = blocks.keys[: blocks.size], blocks.tiers[column, : blocks.size]
    copied = set(keys[(tiers & (Tier.WARM | Tier.COLD)) != 0].tolist())
    ranked = ranking.order.tolist() + ranking.protected.tolist()
    spilling = ranking.spill_first.tolist()
    assert not set(spilling) & copied
    assert spilling == [key for key in ranked if key in set(spilling)]
    assert set(ranking.protected.tolist()) <= set(spilling) | copied
    demoting = ranking.demote_first.tolist()
    assert sorted(demoting) == sorted(set(keys[(tiers & Tier.WARM) != 0].tolist()) - hot)
    place = {key: position for position, key in enumerate(demoting)}
    for key in demoting:
        parent = int(blocks.parent[blocks.find(np.array([key], np.uint64))[0]])
        if parent != NO_ROW and int(keys[parent]) in place:
            assert place[key] < place[int(keys[parent])], "a copy goes after what needs it"
    check_prefetch(graph, column, hot, copied)


def check_prefetch(graph: KVCacheGraph, column: int, hot: set[int], copied: set[int]) -> None:
    """What should come back has a copy, is not here, and follows what stands before it."""
    blocks = graph.tables.blocks
    engine = next(name for name, at in graph.tables.engines.items() if at == column)
    wanted = graph.prefetch_order(engine, 1000).tolist()
    there = set(hot)
    assert set(wanted) <= copied - hot
    assert len(set(wanted)) == len(wanted)
    for key in wanted:
        row = int(blocks.find(np.array([key], np.uint64))[0])
        parent = int(blocks.parent[row])
        assert (parent == NO_ROW) == (blocks.depth[row] == 0)
        assert parent == NO_ROW or int(blocks.keys[parent]) in there
        there.add(key)
