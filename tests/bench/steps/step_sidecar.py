"""Graph and planner beside an engine of the bench: what advises it is what advises a live one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from kvgraph.advisor.config.config import Config
from kvgraph.advisor.config.sections import PolicyConfig
from kvgraph.advisor.planner import GraphEvictionAdvisor
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.wire.advice import PrefetchMessage, RankingMessage
from kvgraph.graph.wire.events import BlocksRemoved

TOLD_S: Final = 0.5  # between two rankings


class StepSidecar:
    """Hears what an engine's client would have sent, and ranks its blocks every half second.

    Its policy ranks from the start: without a ranking in force there is little to measure.

    Args:
        clock: Monotonic seconds, the engine's own.

    Attributes:
        evicted: Blocks that the engine evicted.
    """

    def __init__(self, side: Any, clock: Any) -> None:
        self.evicted = 0
        self._side, self._clock = side, clock
        config = Config(policy=PolicyConfig(guard=False))
        self._graph = KVCacheGraph(
            policy=config.policy.policy(config.score.weights()),
            rules=config.rules(),
            limits=config.graph.limits(),
            clock=clock,
        )
        hello = side.hello()
        self._name = hello.engine
        self._graph.apply(self._name, [hello])
        self._planner = GraphEvictionAdvisor(
            self._graph, lambda: {self._name: 0}, interval_s=TOLD_S,
            max_ranked=config.sidecar.max_ranked, prefetch=config.prefetch, clock=clock,
        )  # fmt: skip
        self._next = 0.0
        self._heard = 0  # batches of the engine's

    def hear(self) -> None:
        """Take what was emitted; rank where that is due."""
        client, now = self._side.client, self._clock()
        events = client.outbox.take_all()
        self.evicted += sum(len(e.hashes) // 8 for e in events if isinstance(e, BlocksRemoved))
        self._heard += 1
        client.mark_sent(self._heard, until=now)
        self._graph.apply(self._name, events)
        if now < self._next:
            return
        self._next = now + TOLD_S
        self._graph.apply(self._name, self._side.heartbeat(0))
        self._planner.tick()
        ranking = self._planner.latest.get(self._name)
        if ranking is not None:
            knowing = replace(ranking, heard=self._heard)
            client.put(RankingMessage.of(knowing, max(0.0, now - ranking.ts)))
        order = self._planner.orders.latest.get(self._name)
        if order is not None:
            client.put(PrefetchMessage(order.keys.tobytes()))
