"""vLLM's scheduler on paper beside a sidecar that is late in every way: no protected block is lost
while another is free."""

from __future__ import annotations

import dataclasses
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from budgets import small_or_large
from kvgraph.advisor.config.sections import PrefetchConfig
from kvgraph.advisor.planner import GraphEvictionAdvisor
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.ranking.policy import Rules
from kvgraph.graph.wire.events import BlocksResident
from kvgraph.hooks.keys import key_of
from kvgraph_bench.paper.paper_engine import BLOCK_SIZE, PaperEngine, Shape

HEAD = 7  # protected blocks that open the prompts of one tenant
TENANTS = 3
ROUNDS = 30
MOST_SILENT = 12  # requests between two of tenants, which take turns
SHAPES = {
    "plain": Shape(blocks=81, warm=None),
    "asynchronous": Shape(blocks=81, warm=None, asynchronous=True),
    "tiers": Shape(blocks=81, warm=160),
    "tiers, asynchronous": Shape(blocks=81, warm=160, asynchronous=True),
}


class LateSidecar:
    """Graph and planner of a sidecar; what it hears and what it says is as late as chance has it.

    Args:
        dies: Whether another one takes its place now and then, which knows nothing.
    """

    def __init__(
        self, engine: PaperEngine, clock: Callable[[], float], rng: random.Random, dies: bool
    ) -> None:
        self._side, self._clock, self._rng, self._dies = engine.side, clock, rng, dies
        self._client = self._side.client
        self._hears_after = self._says_after = 0.0
        self._next = self._alive_until = clock()
        self._link()

    def turn(self) -> None:
        now = self._clock()
        self._say(now)
        if now < self._next:
            return
        self._next = now + 0.1
        if self._rng.random() < 0.02:
            self._hears_after = self._rng.choice([0, 0, 1, 5, 15, 40])
            self._says_after = self._rng.choice([0, 0, 0.5, 3, 10])
        elif self._dies and now > self._alive_until and self._rng.random() < 0.003:
            self._link()
        told = [*self._client.outbox.take_all(), *self._side.heartbeat(0)]
        self._unheard.append((now, told))
        while self._unheard and self._unheard[0][0] <= now - self._hears_after:
            self._known_of, events = self._unheard.popleft()
            self._graph.apply("engine", events)
        self._planner.tick()
        after = max(now + self._says_after, self._unsaid[-1][0] if self._unsaid else 0.0)
        known = self._known_of
        made = dataclasses.replace(self._planner.latest["engine"], ts=now, known_of=known)
        self._unsaid.append((after, made, self._planner.orders.latest["engine"].keys))

    def _link(self) -> None:
        """A new sidecar greets the engine; it lives for as long as callers' words outlive it."""
        self._graph = KVCacheGraph(rules=Rules(protected_share=0.5), clock=self._clock)
        self._planner = GraphEvictionAdvisor(
            self._graph, lambda: {"engine": 0}, interval_s=0.5, max_ranked=4096,
            prefetch=PrefetchConfig(), clock=self._clock,
        )  # fmt: skip
        self._unheard: deque[tuple[float, list[Any]]] = deque()
        self._unsaid: deque[tuple[float, Any, Any]] = deque()
        self._client.outbox.take_all()
        self._client.outbox.open(1 << 20)
        listed = [self._side.hello(), BlocksResident(self._side.resident()), *self._side.copies()]
        self._graph.apply("engine", listed)
        self._client.linked_since = self._known_of = self._clock()
        self._alive_until = self._clock() + 5.0

    def _say(self, now: float) -> None:
        while self._unsaid and self._unsaid[0][0] <= now:
            _, made, wanted = self._unsaid.popleft()
            ts = max(made.ts, now - 0.3 * self._rng.random())  # messages look younger than they are
            self._client.hold_ranking(dataclasses.replace(made, ts=ts))
            self._client.hold_wanted(wanted)


class Watched:
    """The engine's pool: what it gives away while other blocks are free."""

    def __init__(self, engine: PaperEngine) -> None:
        self.protected: set[int] = set()
        self.needless = self.taken = 0
        self._pool, self._take = engine.pool, engine.pool.get_new_blocks
        engine.pool.get_new_blocks = self._taken

    def _taken(self, count: int) -> Any:
        free = self._pool.free_block_queue.get_all_free_blocks()
        marks = [each.block_hash is not None and self._is_protected(each) for each in free]
        self.needless += min(sum(marks[:count]), sum(not each for each in marks[count:]))
        self.taken += count
        return self._take(count)

    def _is_protected(self, block: Any) -> bool:
        return key_of(block.block_hash[:-4]) in self.protected


def prompts(rng: random.Random) -> Iterator[tuple[list[int], dict[str, Any]]]:
    """Now and then a tenant's, behind its rules; mostly text that rarely comes again.

    No tenant is silent for as long as callers' words outlive a sidecar that heard them: a new one
    knows nothing of its rules until it asks.
    """
    earlier: list[list[int]] = []
    silent = tenant = 0
    rules = {"segments": [{"layer": "rules", "start": 0, "end": HEAD * BLOCK_SIZE}]}
    for number in range(6 * ROUNDS):
        silent += 1
        if rng.random() < 0.15 or number < 6 or silent > MOST_SILENT:
            silent, tenant = 0, (tenant + 1) % TENANTS
            head = [3 + tenant, *range(10, 9 + HEAD * BLOCK_SIZE)]
            yield head + [rng.randrange(10, 180) for _ in range(rng.randrange(10, 75))], rules
        elif earlier and rng.random() < 0.3:
            yield rng.choice(earlier[-12:]), {}
        else:
            earlier.append([rng.randrange(10, 180) for _ in range(rng.randrange(50, 200))])
            yield earlier[-1], {}


def played(config: Any, shape: Shape, seed: int, dies: bool) -> Watched:
    """An engine that serves the workload beside such a sidecar; time is what the seed makes it."""
    rng, now = random.Random(seed), 1000.0
    engine = PaperEngine(config, shape, random.Random(seed), clock=lambda: now)
    watch, sidecar = Watched(engine), LateSidecar(engine, lambda: now, rng, dies)
    asked = prompts(rng)
    for _ in range(ROUNDS):
        for tokens, tag in [next(asked) for _ in range(6)]:
            request = engine.ask(tokens, rng.randrange(1, 20))
            request.kv_transfer_params = {"kvgraph": tag}
            if tag:
                watch.protected.update(map(key_of, request.block_hashes[:HEAD]))
        while engine.scheduler.has_requests() or engine.batches:
            engine.step()
            if rng.random() < 0.7:
                engine.finish_copies()
            now += rng.choice([0.005, 0.02, 0.1, 0.4])
            sidecar.turn()
        now += rng.choice([0, 0.1, 1.0, 3.0])
    assert engine.side is not None, "it was disabled"
    return watch


@pytest.mark.parametrize("runs", small_or_large(2, 6))
@pytest.mark.parametrize("dies", [False, True], ids=["lives", "dies"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_no_protected_block_is_lost_to_a_late_sidecar(
    paper_config: Any, shape: Shape, dies: bool, runs: int
) -> None:
    pools = [played(paper_config, shape, seed, dies) for seed in range(100, 100 + runs)]
    assert sum(pool.taken for pool in pools) > runs * 5 * shape.blocks, "too little was asked of it"
    assert [pool.needless for pool in pools] == [0] * runs
