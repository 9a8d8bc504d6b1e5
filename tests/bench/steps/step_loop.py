"""A scheduler's dealings with its block pool and our connector, step by step, without a model."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Final

from kvgraph.advisor.assembly import new_graph
from kvgraph.advisor.config.config import Config
from kvgraph.advisor.config.sections import PolicyConfig
from kvgraph.advisor.planner import GraphEvictionAdvisor
from kvgraph.graph.wire.advice import PrefetchMessage
from kvgraph.graph.wire.events import BlocksRemoved
from kvgraph.hooks.tiers.jobs import JobDone, TierAnswer, TierWork

from ..hotpath import BLOCK_SIZE, new_pool, request_maker

PROMPT_BLOCKS: Final = 64
SHARED_BLOCKS: Final = 48  # of every prompt, cached since the first
OUTPUT_BLOCKS: Final = 16  # each request ends after so many and another takes its place
PREFILL_TOKENS: Final = 16_384
LINK_BYTES_PER_S: Final = 20e9  # of a GPU's PCIe link; chosen
BLOCK_BYTES: Final = 2 << 20  # of a model of 8 B parameters: 32 layers, 8 KV heads of 128, bf16


@dataclass(frozen=True, slots=True)
class Load:
    running: int  # requests that decode
    pool: int  # blocks of the pool
    prefill: bool = False  # whether each step computes a prompt of 16k tokens beside
    step_s: float = 0.03  # seconds that a step takes on the engine's clock

    @property
    def tokens(self) -> int:
        return self.running + PREFILL_TOKENS * self.prefill


@dataclass(eq=False, slots=True)
class Running:
    """A request that decodes; its blocks, the last of them not full."""

    request: Any
    blocks: list[Any] = field(default_factory=list)
    filled: int = 0


class StepLoop:
    """One engine; of two with the same load, every step does the same. Empty before ``fill``."""

    def __init__(self, load: Load, connect: Callable[[Any], Any] | None = None) -> None:
        self.load = load
        self.pool = new_pool(load.pool)
        self.connector: Any = connect(self.pool) if connect is not None else None
        self._make, self._numbers = request_maker(), itertools.count()
        self._shared: list[Any] = []
        self._running: list[Running] = []
        self._prefilled: Running | None = None
        self._late = TierAnswer()  # of the last step's orders
        self._step = 0

    def fill(self, settled: Callable[[], None]) -> None:
        """Let sessions come and go until the pool is full, and then the requests that stay."""
        first = self._start(self._prompt(PROMPT_BLOCKS), [])
        self._shared = first.blocks[:SHARED_BLOCKS]
        for _ in range(self.load.pool // (8 * PROMPT_BLOCKS) + 1):
            self._finish(self._start(self._prompt(8 * PROMPT_BLOCKS), []))
            self._settle(settled)
        for number in range(self.load.running):
            each = self._start(self._prompt(PROMPT_BLOCKS), self._shared)
            each.filled = number * OUTPUT_BLOCKS // self.load.running
            self._running.append(each)
            self._settle(settled)

    def prepare(self) -> None:
        """Do for the next step what a scheduler does not: tokens are sampled, prompts hashed."""
        self._due = list(self._at_a_blocks_end())
        for each in self._due:
            each.request.append_output_token_ids([0] * BLOCK_SIZE)
        ending = [each for each in self._due if each.filled + 1 == OUTPUT_BLOCKS]
        self._coming = [self._prompt(PROMPT_BLOCKS) for _ in ending]
        self._long = self._prompt(PREFILL_TOKENS // BLOCK_SIZE) if self.load.prefill else None

    def step(self) -> float:
        """Seconds that the step took of this thread: other processes' load is not its cost."""
        began = time.thread_time()
        if self._prefilled is not None:
            self._finish(self._prefilled)
        for each in self._due:
            self._decode(each)
        for request in self._coming:
            self._running.append(self._start(request, self._shared))
        self._prefilled = self._start(self._long, []) if self._long is not None else None
        if self.connector is not None:
            self._ask(self.load.tokens)
        took = time.thread_time() - began
        self._step += 1
        return took

    def _at_a_blocks_end(self) -> Iterator[Running]:
        """Of the requests, one in sixteen: staggered, as in a server."""
        return itertools.islice(self._running, self._step % BLOCK_SIZE, None, BLOCK_SIZE)

    def _decode(self, each: Running) -> None:
        each.blocks += self.pool.get_new_blocks(1)
        request, full = each.request, len(each.blocks) - 1
        request.num_computed_tokens = full * BLOCK_SIZE
        self.pool.cache_full_blocks(request, each.blocks, full - 1, full, BLOCK_SIZE, 0)
        each.filled += 1
        if each.filled == OUTPUT_BLOCKS:
            self._finish(each)
            self._running.remove(each)

    def _start(self, request: Any, hits: list[Any]) -> Running:
        connector, pool, held = self.connector, self.pool, len(hits)
        if connector is not None:
            connector.on_new_request(request)
            connector.get_num_new_matched_tokens(request, held * BLOCK_SIZE)
        pool.touch(hits)
        count = request.num_prompt_tokens // BLOCK_SIZE
        blocks = hits + pool.get_new_blocks(count - held)
        if connector is not None:
            connector.update_state_after_alloc(request, _blocks(blocks), 0)
        pool.cache_full_blocks(request, blocks, held, count, BLOCK_SIZE, 0)
        request.num_computed_tokens = count * BLOCK_SIZE
        return Running(request, blocks + pool.get_new_blocks(1))

    def _finish(self, each: Running) -> None:
        if self.connector is not None:
            ids = [block.block_id for block in each.blocks]
            self.connector.request_finished_all_groups(each.request, (ids,))
        self.pool.free_blocks(reversed(each.blocks))

    def _ask(self, tokens: int) -> None:
        """The step's end: orders go out, and answers to those that the link could carry come in."""
        output = SimpleNamespace(total_num_scheduled_tokens=tokens)
        metadata = self.connector.build_connector_meta(output)
        new, late = _answer(getattr(metadata, "work", None)), self._late
        in_time = sum(done.seconds for done in new.done) <= self.load.step_s
        answer, self._late = (late + new, TierAnswer()) if in_time else (late, new)
        said = SimpleNamespace(answer=answer) if answer else None
        self.connector.update_connector_output(
            SimpleNamespace(kv_connector_worker_meta=said, finished_recving=None)
        )

    def _prompt(self, blocks: int) -> Any:
        tokens = list(range(blocks * BLOCK_SIZE))
        own = 0 if blocks != PROMPT_BLOCKS else SHARED_BLOCKS * BLOCK_SIZE
        tokens[own] = -1 - next(self._numbers)  # what follows is this request's own
        return self._make(tokens)

    def _settle(self, settled: Callable[[], None]) -> None:
        if self.connector is not None:
            self._ask(0)
        settled()


def _blocks(blocks: list[Any]) -> Any:
    """As vLLM shows a request's blocks."""
    return SimpleNamespace(get_block_ids=lambda: ([block.block_id for block in blocks],))


def _answer(work: TierWork | None) -> TierAnswer:
    """What a worker says to a step's orders, if there are any: all done, as fast as the link is."""
    jobs = work.jobs if work is not None else ()
    sizes = [len(job.copies) * BLOCK_BYTES for job in jobs]
    return TierAnswer(
        tuple(
            JobDone(job.id, frozenset(), size / LINK_BYTES_PER_S, size)
            for job, size in zip(jobs, sizes, strict=True)
        )
    )


TOLD_S: Final = 0.5  # between two rankings


class StepSidecar:
    """Hears what a client would have sent, and ranks twice a second, from the start."""

    def __init__(self, side: Any, clock: Any) -> None:
        self.evicted = 0  # blocks that the engine evicted
        self._side, self._clock = side, clock
        config = Config(policy=PolicyConfig(guard=False))
        self._graph = new_graph(config, clock)
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
            client.put(replace(ranking, heard=self._heard))
        order = self._planner.orders.latest.get(self._name)
        if order is not None:
            client.put(PrefetchMessage(order.keys.tobytes()))
