"""Graph and planner beside an engine on paper, told and heard in rounds, as over the wire."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from kvgraph.advisor.assembly import new_graph
from kvgraph.advisor.config.config import Config
from kvgraph.advisor.config.sections import PolicyConfig, ScoreConfig
from kvgraph.advisor.planner import GraphEvictionAdvisor
from kvgraph.graph.wire.events import HOLD_ENDS
from kvgraph.hooks.vllm.patches import bind_scheduler

from ...paper.paper_engine import PaperEngine
from ..closed_sidecar import HoldCounts
from .closed_paper_arms import PaperArm

TOLD_S: Final = 0.5  # between rounds of the sidecar
_QUEUE: Final = 1 << 20  # events: none is dropped between two rounds


class PaperSidecar:
    """What a sidecar knows of one engine, and what it says to it.

    Args:
        engine: One that was made with ``time`` for its clock.
        time: Seconds, from 0 on.
    """

    def __init__(self, engine: PaperEngine, arm: PaperArm, time: Callable[[], float]) -> None:
        self._side, self._time = engine.side, time
        if arm.hold:
            bind_scheduler(engine.scheduler)
        self._side.client.outbox.open(_QUEUE)
        self._side.client.linked_since = 0.0
        policy = PolicyConfig(name="lru") if arm.plain else PolicyConfig()
        none = ScoreConfig(protected_share=0.0, inferred_share=0.0)
        config = Config(policy=policy, score=none if arm.unprotected else ScoreConfig())
        self.graph = new_graph(config, time)
        hello = self._side.hello()
        self._name = hello.engine
        self.graph.apply(self._name, [hello])
        self._planner = GraphEvictionAdvisor(
            self.graph, lambda: {self._name: 0}, interval_s=TOLD_S,
            max_ranked=config.sidecar.max_ranked, prefetch=config.prefetch, clock=time,
        )  # fmt: skip
        self._next = 0.0

    def turn(self) -> None:
        """Once in a round: all that happened, and advice of it."""
        now = self._time()
        if now < self._next:
            return
        self._next = now + TOLD_S
        client = self._side.client
        events = [*client.outbox.take_all(), *self._side.heartbeat(0)]
        self.graph.apply(self._name, events)
        self._planner.tick()
        ranking = self._planner.latest.get(self._name)
        word = self._planner.admissions.get(self._name)
        order = self._planner.orders.latest.get(self._name)
        client.hold_ranking(None if ranking is None else replace(ranking, known_of=now))
        client.hold_admission(None if word is None else replace(word, known_of=now))
        client.hold_wanted(None if order is None else order.keys)

    def held(self) -> HoldCounts | None:
        """What the engine counted; None where nobody is held."""
        if self._side.holding is None:
            return None
        report = self._side.holding.report()
        ends = dict(zip(HOLD_ENDS, report.released, strict=True))
        return HoldCounts(report.held, report.not_held, report.longest_s, report.waited_s, ends)
