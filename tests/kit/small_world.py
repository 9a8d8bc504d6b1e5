"""A graph with a clock, and engines that say what a scheduler would say."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kvgraph.advisor.config.config import Config
from kvgraph.advisor.config.edits import ConfigWatch
from kvgraph.advisor.page.page import Page, QueryGate, RecentAnswers
from kvgraph.advisor.shadows.runner import ShadowRunner
from kvgraph.advisor.words.times import UnixTime
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.logs.evictions import TermsAtRanking
from kvgraph.graph.logs.history import History
from kvgraph.graph.logs.reasons import Reason
from kvgraph.graph.types import as_keys
from kvgraph.graph.wire.advice import EvictionRanking
from kvgraph.graph.wire.events import (
    AnyEvent,
    EngineHello,
)
from turns import SIZE, Told, finished, removed, started, stored
from wire_keys import pack

BEGIN = 1000.0  # the world's time at first


class World(Told):
    """Two engines, ``a`` and ``b``, of one model; blocks of 16 tokens, pools of 100."""

    def __init__(self) -> None:
        super().__init__(now=BEGIN)
        self.number = 0
        for engine in ("a", "b"):
            self.tell(EngineHello(f"host:{engine}", "model", SIZE, 100, "vllm"), engine=engine)

    @property
    def history(self) -> History:
        return self.graph.tables.history

    def tell(self, *events: AnyEvent, engine: str = "a") -> None:
        self.now += 1.0
        self.graph.apply(engine, list(events))

    def start(
        self, *keys: int, loading: int = 0, session: str | None = "s", engine: str = "a",
        tail: int = 5, says: tuple[int, ...] = (), **fields: Any,
    ) -> str:  # fmt: skip
        """A request of these blocks and a partial one; its blocks enter the pool."""
        self.number += 1
        name = f"r{self.number}"
        prompt = started(
            name, *keys, more=tail, session=session, loading_tokens=SIZE * loading,
            contents=pack(*says), **fields,
        )  # fmt: skip
        self.tell(prompt, engine=engine)
        return name

    def serve(self, *keys: int, found: int = 0, engine: str = "a", **words: Any) -> str:
        """A request from its start to its end."""
        name = self.start(*keys, found=found, engine=engine, **words)
        if fresh := keys[found:]:
            self.tell(stored(*fresh, behind=keys[found - 1] if found else None), engine=engine)
        self.end(name, *keys, engine=engine, **words)
        return name

    def end(self, name: str, *keys: int, engine: str = "a", **words: Any) -> None:
        """The end of a request that was started with these words."""
        session, tail = words.get("session", "s"), words.get("tail", 5)
        self.tell(finished(name, *keys, more=tail, session=session), engine=engine)

    def evict(self, *keys: int, engine: str = "a") -> None:
        self.tell(removed(*keys), engine=engine)

    def rank(
        self, *keys: int, engine: str = "a", kept: tuple[int, ...] = (), **terms: list[float]
    ) -> None:
        """A ranking of these blocks, the first to go first, that keeps others back; and what their
        scores were made of.
        """
        column, layers = self.graph.tables.engines[engine], self.graph.rules.protected_layers
        then = TermsAtRanking.of({name: np.array(each) for name, each in terms.items()})
        self.history.ranked(column, self.ranking(*keys, kept=kept), layers, then)

    def ranking(self, *keys: int, kept: tuple[int, ...] = ()) -> EvictionRanking:
        named = {"order": as_keys(list(keys)), "protected": as_keys(list(kept))}
        return replace(EvictionRanking.empty(self.now), epoch=7, **named)

    def last(self) -> tuple[Reason, int, int]:
        """The newest request's reason, its detail, and the first block that it missed."""
        record = self.history.requests.record(self.history.requests.next - 1)
        return Reason(int(record["reason"])), int(record["detail"]), int(record["index"])

    def other(self) -> tuple[str | None, str | None]:
        return self.history.requests.names(self.history.requests.next - 1).other[:2]


def page_of(world: World, *ranked: str, since: float = 1e9) -> Page:
    """The page's data of a world, by whose clock it goes; these engines were just ranked."""
    latest = {engine: world.graph.rank(engine, 100) for engine in ranked}
    return page_over(
        world.graph,
        questions=QueryGate(world.graph.lock, lambda: 0.0),
        latest=lambda: latest,
        wall=lambda: world.now + since,
    )


def page_over(graph: KVCacheGraph, *, wall: Callable[[], float] = time.time, **parts: Any) -> Page:
    """The page's data of a graph without a sidecar around it; ``parts`` are fields of ``Page``."""
    given: dict[str, Any] = {
        "questions": QueryGate(graph.lock, time.monotonic),
        "recent": RecentAnswers(graph.clock),
        "status": lambda: None,
        "latest": dict,
        "admissions": dict,
        "shadows": ShadowRunner(graph, graph.clock),
        "watch": ConfigWatch(Config(), None, {}, graph.clock),
        "intended": lambda: None,
        "unix": UnixTime(graph.clock, wall),
    }
    return Page(graph, **{**given, **parts})


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def page(world: World) -> Page:
    return page_of(world)
