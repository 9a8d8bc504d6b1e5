"""A graph made of plain dicts and sets: what events mean, said as simply as possible."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from kvgraph.graph.types import DEFAULT_IMPORTANCE, SessionState, SourceLayer, Tier
from kvgraph.graph.wire.events import (
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
    SessionSignal,
)

SIZE = 16


@dataclass
class NaiveBlock:
    parent: int | None = None
    layer: int = SourceLayer.USER_TURN
    importance: float = float(DEFAULT_IMPORTANCE[SourceLayer.USER_TURN])
    stated: bool = False
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
    first: int = 0
    reach: int = 0


class NaiveBlocks:
    """Blocks, their tiers, and edges between them."""

    def __init__(self) -> None:
        self.blocks: dict[int, NaiveBlock] = {}
        self.edges: dict[tuple[str, Any, Any], float] = {}
        self.pairs: dict[tuple[int, int], int] = {}
        self.recalled: dict[str, dict[str, int]] = {}
        self.recalls: dict[str, int] = {}
        self.swept: float | None = None

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

    def fade(self, now: float) -> None:
        """Behind each list of events."""
        self.swept = now if self.swept is None else self.swept
        if now - self.swept >= 60:
            factor = 0.5 ** ((now - self.swept) / 300)
            for edge in [edge for edge in self.edges if edge[0] == "co_attend"]:
                self.edges[edge] *= factor
            self.swept = now

    def attend(self, keys: list[int]) -> None:
        for a in keys:
            for b in keys:
                if a < b:
                    self.attend_pair(a, b)

    def value_attended(self, keys: list[int]) -> None:
        """All masses are 1: where more than two blocks share a step, each got much."""
        for key in keys if len(keys) > 2 else ():
            block = self.blocks[key]
            if not block.stated:
                block.importance += 0.05 * max(0.0, 0.8 - block.importance)

    def attend_pair(self, a: int, b: int) -> None:
        if ("co_attend", a, b) in self.edges:
            self.edges["co_attend", a, b] += 1
            return
        self.pairs[a, b] = self.pairs.get((a, b), 0) + 1
        if self.pairs[a, b] == 3:
            self.edges["co_attend", a, b] = float(self.pairs.pop((a, b)))


class NaiveTurns(NaiveBlocks):
    """Sessions, and what their requests make of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.sessions: dict[str, NaiveSession] = {}
        self.inferred: dict[tuple[str, str], str] = {}
        self.known_size: set[int] = set()  # keys whose block size an event stated

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
        name = event.session or self.infer(engine, event, keys)
        self.tag(event, keys, name)
        session = self.session(name)
        for key in keys:
            self.block(key).superseded = False
        beside = self.is_beside(session, keys)
        if session.running == 0:
            self.supersede(name, None if beside else session.tip, keys)
            if not session.turns:
                session.first = len(keys)
            session.turns += 1
        self.own(name, keys)
        session.running += 1
        session.engine = engine
        session.reach = session.reach if beside else len(keys)
        session.state = SessionState.RUNNING
        self.mark_tip(name, keys)

    def tag(self, event: RequestStarted, keys: list[int], name: str) -> None:
        whole = [segment for segment in event.segments if segment.start < segment.end]
        for segment in sorted(whole, key=lambda each: -each.layer):
            covered = keys[segment.start // SIZE : -(-segment.end // SIZE)]
            for key in covered:
                block = self.block(key)
                block.layer, block.stated = segment.layer, True
                default = float(DEFAULT_IMPORTANCE[segment.layer])
                block.importance = default if segment.importance is None else segment.importance
            if segment.memory_id and covered:
                self.recall(segment.memory_id, covered, segment.importance is None, name)

    def recall(self, memory: str, keys: list[int], gains: bool, name: str) -> None:
        """Another session, or another place, makes all blocks of a memory dearer."""
        refer = [(key, target) for kind, key, target in self.edges if kind == "memory_ref"]
        linked = {key for key, target in refer if target == memory}
        sessions = self.recalled.setdefault(memory, {})
        carried = name in sessions and {key for key, _ in refer}.issuperset(keys)
        if not carried and (name not in sessions or not linked.issuperset(keys)):
            sessions[name] = sessions.pop(name, 0)
            self.recalls[memory] = self.recalls.get(memory, 0) + 1
            self.value(memory, linked)
        if gains:
            self.value(memory, set(keys))
        for key in keys:
            self.edges["memory_ref", key, memory] = self.block(key).importance

    def value(self, memory: str, keys: set[int]) -> None:
        worth = 1 - 0.5 * 0.9 ** (self.recalls[memory] - 1)
        for key in keys if self.recalls[memory] > 1 else ():
            self.block(key).importance = max(self.block(key).importance, worth)

    def infer(self, engine: str, event: RequestStarted, keys: list[int]) -> str:
        name = self.continued(keys)
        if name is None:
            name = f"~{engine}/{event.request_id}"
            self.session(name)
            for key in keys:
                if self.block(key).superseded:
                    self.block(key).session = name
        self.inferred[engine, event.request_id] = name
        return name

    def continued(self, keys: list[int]) -> str | None:
        seen = list(itertools.takewhile(lambda key: self.block(key).session is not None, keys))
        if not seen or self.block(seen[-1]).shared:
            return None
        name = self.block(seen[-1]).session
        session = self.sessions[name or ""]
        left_behind = any(self.block(key).superseded for key in keys)
        left_early = len(seen) < session.reach - 1 and len(seen) <= session.first
        kept = (2 * len(seen) > session.reach and not left_early) or (
            session.turns >= 5 and self.compacts(len(seen), len(keys), session.reach)
        )
        return name if kept and not session.running and not left_behind else None

    def compacts(self, known: int, blocks: int, before: int) -> bool:
        full = before * 4 >= 3 * max(each.reach for each in self.sessions.values())
        return full and 2 * blocks <= before and (blocks - known) * 20 >= before

    def is_beside(self, session: NaiveSession, keys: list[int]) -> bool:
        root = session.tip
        while root is not None and (parent := self.blocks[root].parent) is not None:
            root = parent
        return root is not None and root != keys[0] and 2 * len(keys) <= session.reach

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

    def finish(self, engine: str, event: RequestFinished, keys: list[int]) -> None:
        inferred = self.inferred.pop((engine, event.request_id), None)
        sized = self.blocks.get(keys[0]) is not None and self.sized(keys[0])
        self.lay(keys)
        written = keys[event.prompt_tokens // SIZE :] if sized else keys
        for key in written:
            block = self.block(key)
            if block.walkers == 0 and block.layer != SourceLayer.GENERATION:
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

    def signal(self, session: NaiveSession, ended: bool, waiting: bool | None) -> None:
        if session.running:
            return
        if ended:
            session.state = SessionState.ENDED
        elif waiting:
            session.state = SessionState.WAITING_FOR_TOOL
        elif waiting is False and session.state == SessionState.WAITING_FOR_TOOL:
            session.state = SessionState.IDLE


class NaiveGraph(NaiveTurns):
    """Events, one after the other."""

    def apply(self, engine: str, event: Any, now: float) -> None:
        keys = np.frombuffer(getattr(event, "hashes", b""), "<u8").tolist()
        match event:
            case BlocksStored():
                self.store(engine, event, keys)
            case BlocksRemoved():
                self.clear_tier(engine, keys, Tier.HOT)
            case BlocksCleared():
                self.clear_tier(engine, list(self.blocks), Tier.HOT)
            case BlocksResident():
                for tier in (Tier.HOT, Tier.WARM, Tier.COLD):
                    self.clear_tier(engine, list(self.blocks), tier)
                for key in keys:
                    self.set_tier(engine, key, Tier.HOT)
            case BlocksSpilled(tier=Tier.POOL):  # no engine holds a block that is there alone
                for key in filter(self.blocks.__contains__, keys):
                    self.set_tier(engine, key, Tier.POOL)
            case BlocksSpilled():
                for key in keys:
                    self.set_tier(engine, key, Tier(event.tier))
                    self.edges["spill_link", key, (key, event.tier)] = 1.0
            case CopiesDropped(tier=Tier.POOL):  # the store is everybody's
                for each in {name for key in self.blocks for name in self.blocks[key].tiers}:
                    self.clear_tier(each, keys, Tier.POOL)
            case CopiesDropped():
                self.clear_tier(engine, keys, Tier(event.tier))
            case BlocksLoaded():
                for key in keys:
                    self.set_tier(engine, key, Tier.HOT)
            case BlocksAttended():
                known = sorted({key for key in keys if key in self.blocks})
                self.value_attended(known)
                self.attend(known)
            case RequestStarted():
                self.start(engine, event, keys)
            case RequestFinished():
                self.finish(engine, event, keys)
            case SessionSignal():
                if event.session in self.sessions:
                    self.signal(self.session(event.session), event.ended, event.waiting_for_tool)

    def store(self, engine: str, event: BlocksStored, keys: list[int]) -> None:
        if event.parent is not None:
            self.block(event.parent)
        self.lay(([] if event.parent is None else [event.parent]) + keys)
        for key in keys:
            self.set_tier(engine, key, Tier.HOT)
            if event.session and self.block(key).session is None:
                self.block(key).session = event.session
        if event.session:
            self.session(event.session)

    def forget(self, engine: str) -> None:
        for block in self.blocks.values():
            block.tiers.pop(engine, None)
        for session in self.sessions.values():
            if session.running and session.engine == engine:
                session.running, session.state = 0, SessionState.IDLE
        for request in [request for request in self.inferred if request[0] == engine]:
            del self.inferred[request]
        self.unlink_lost_copies()
