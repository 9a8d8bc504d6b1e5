"""Engines on paper whose steps take a model's seconds, and a sidecar that advises them.

Scheduler, cache manager, connector, hold, graph and planner are the real ones; a step takes what a
model of the service says. Nothing depends on how busy this machine is, and hours take seconds.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec
from kvgraph.advisor.assembly import new_graph
from kvgraph.advisor.config.config import Config
from kvgraph.advisor.planner import GraphEvictionAdvisor
from kvgraph.advisor.replay.trace import AGENTS_SERVICE, HostLink
from kvgraph.graph.wire.events import AnyEvent, BlocksResident
from kvgraph.hooks.vllm.tiers.worker import TierMetadata, TierWorkerMetadata

from ..closed.closed_pass import LONGEST_FIRST, ClosedTurn
from ..recorded.agents_requests import SHRINK
from .paper_engine import BLOCK_SIZE, PaperEngine, Shape
from .paper_model import LOADS, SPILLS, Batch, aggregated, runner_output

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.outputs import KVConnectorOutput

_IDLE_S: Final = 0.05  # a step that schedules nothing; chosen


class Asked(Protocol):
    @property
    def turn(self) -> ClosedTurn:
        """What it asks, and what is answered."""


@dataclass(frozen=True, slots=True)
class PaperService:
    """A model's ``prefill`` tokens/s, ``step_tokens`` at most, and least seconds of a step."""

    prefill: float
    decode_s: float
    step_tokens: int
    sequences: int = 64  # no run with ``--best 20`` has more agents; chosen
    step_s: float = 0.0

    def step(
        self, scheduler: Any, order: Any, asked: Mapping[str, Asked]
    ) -> tuple[dict[str, list[int]], float]:
        """The tokens that it says, by request, as the answers have them; the seconds it takes."""
        tokens: dict[str, list[int]] = {}
        prefilled, decodes = 0, False
        for name, count in order.num_scheduled_tokens.items():
            request = scheduler.requests[name]
            said = request.num_tokens - request.num_prompt_tokens
            decodes = decodes or said > 0
            prefilled += count if not said else 0
            whole = request.num_computed_tokens >= request.num_tokens
            tokens[name] = [asked[name].turn.request.answer[said]] if whole else []
        return tokens, self._seconds(prefilled, decodes)

    def _seconds(self, prefilled: int, decodes: bool) -> float:
        if not prefilled and not decodes:
            return _IDLE_S
        return self.step_s + max(prefilled / self.prefill, self.decode_s if decodes else 0.0)

    def config(self, base: VllmConfig, longest_first: bool = False) -> VllmConfig:
        """``base`` for prompts of up to 4,096 tokens, in such steps."""
        config = copy.copy(base)
        config.model_config = copy.copy(base.model_config)
        config.scheduler_config = copy.copy(base.scheduler_config)
        config.model_config.max_model_len = 4096
        config.scheduler_config.max_model_len = 4096
        config.scheduler_config.max_num_batched_tokens = self.step_tokens
        config.scheduler_config.max_num_scheduled_tokens = None
        config.scheduler_config.max_num_seqs = self.sequences
        config.scheduler_config.scheduler_cls = LONGEST_FIRST if longest_first else None
        return config


AGENTS: Final = PaperService(
    prefill=AGENTS_SERVICE.prefill_tokens_per_s / SHRINK,
    decode_s=AGENTS_SERVICE.decode_s_per_token * SHRINK,
    step_tokens=192,  # 180, what prefill reaches in one decode step, in whole blocks
)  # the replay lab's service, in this fleet's smaller tokens


_LANES: Final = (LOADS, SPILLS)  # a link carries both directions at once
_BLOCK_S: Final = HostLink().seconds(1, BLOCK_SIZE * SHRINK)


class TimedEngine(PaperEngine):
    """Its blocks move there and back over a link, in each direction one job after the other."""

    def __init__(self, config: VllmConfig, shape: Shape, service: PaperService = AGENTS) -> None:
        self.now = 0.0
        super().__init__(config, shape, clock=lambda: self.now)
        self._service = service
        self._free_at = dict.fromkeys(_LANES, 0.0)  # when the job that leads a lane may begin

    def take_step(self, asked: Mapping[str, Asked]) -> tuple[Collection[str], Iterator[Any]]:
        """Until ``now``: whose step it was, and what vLLM's front end gets of it."""
        order = self.scheduler.schedule()
        tokens, seconds = self._service.step(self.scheduler, order, asked)
        if self.has_tiers:
            self._submit(order.kv_connector_metadata)
        self.now += seconds
        done = runner_output(tokens)
        if self.has_tiers:
            done = aggregated(Batch(order, {}, [self._moved()], done), self.aggregator)
        outputs = self.scheduler.update_from_output(order, done)
        return tokens, itertools.chain.from_iterable(each.outputs for each in outputs.values())

    def _submit(self, metadata: Any) -> None:
        """Take a step's orders; they begin now, behind those under way."""
        (worker,) = self.workers
        for lane in _LANES:
            if worker.leading(lane) is None:
                self._free_at[lane] = self.now
        if isinstance(metadata, TierMetadata):
            worker.submit(metadata.work, worker.forwards)

    def _moved(self) -> KVConnectorOutput:
        from vllm.v1.outputs import KVConnectorOutput

        (worker,) = self.workers
        for lane in _LANES:
            while (copies := worker.leading(lane)) is not None:
                ends = self._free_at[lane] + copies * _BLOCK_S
                if ends > self.now:
                    break
                self._free_at[lane] = ends
                for _half in range(2):
                    worker.advance(lane)
        worker.forwards += 1
        finished, failed = worker.answers.take_loaded()
        answer = worker.answers.take_answer()
        return KVConnectorOutput(
            finished_recving=finished,
            invalid_block_ids=failed,
            kv_connector_worker_meta=TierWorkerMetadata(answer) if answer else None,
        )


TOLD_S: Final = 0.5  # between rounds of a sidecar; its own interval
_QUEUE: Final = 1 << 20  # events: none is dropped between two rounds
Told = Callable[[str, Sequence[AnyEvent]], None]


class PaperSidecar:
    """Hears engines and advises them; ``told`` gets all that they say."""

    def __init__(
        self, engines: Mapping[str, PaperEngine], config: Config, clock: Callable[[], float],
        told: Told | None = None,
    ) -> None:  # fmt: skip
        self.graph = new_graph(config, clock)
        self._sides = {name: engine.side for name, engine in engines.items()}
        self._clock, self._told = clock, told
        self._planner = GraphEvictionAdvisor(
            self.graph, lambda: dict.fromkeys(engines, 0), interval_s=TOLD_S,
            max_ranked=config.sidecar.max_ranked, prefetch=config.prefetch, clock=clock,
        )  # fmt: skip
        self._next = 0.0
        self._lost: set[str] = set()  # whose news of the next round are lost
        for name, side in self._sides.items():
            side.client.outbox.open(_QUEUE)
            side.client.linked_since = 0.0
            self._hear(name, self._greeting(name))

    def lose_news(self, engine: str) -> None:
        self._lost.add(engine)

    def turn(self) -> None:
        now = self._clock()
        if now < self._next:
            return
        self._next = now + TOLD_S
        for name, side in self._sides.items():
            events = side.client.outbox.take_all()
            if name in self._lost:
                events = self._greeting(name)
            self._hear(name, [*events, *side.heartbeat(0)])
        self._lost.clear()
        self._planner.tick()
        for name, side in self._sides.items():
            self._advise(name, side.client, now)

    def _advise(self, name: str, client: Any, now: float) -> None:
        ranking = self._planner.latest.get(name)
        word = self._planner.admissions.get(name)
        order = self._planner.orders.latest.get(name)
        client.hold_ranking(None if ranking is None else replace(ranking, known_of=now))
        client.hold_admission(None if word is None else replace(word, known_of=now))
        client.hold_wanted(None if order is None else order.keys)

    def _greeting(self, name: str) -> list[AnyEvent]:
        """What an engine tells a sidecar that knows nothing for sure."""
        side = self._sides[name]
        hello = msgspec.structs.replace(side.hello(), engine=name)
        return [hello, BlocksResident(side.resident()), *side.copies()]

    def _hear(self, name: str, events: list[AnyEvent]) -> None:
        self.graph.apply(name, events)
        if self._told is not None:
            self._told(name, events)
