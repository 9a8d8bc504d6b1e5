"""An engine on paper, those who ask it, and its sidecar, on one clock.

Scheduler, cache manager, connector, hold, graph and planner are the real ones; a step takes what a
model of the service says. Nothing depends on how busy this machine is, and hours take seconds.
"""

from __future__ import annotations

import copy
import heapq
import itertools
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Protocol
from unittest.mock import patch

import msgspec
from kvgraph.advisor.assembly import new_graph
from kvgraph.advisor.config.config import Config
from kvgraph.advisor.config.sections import PolicyConfig, ScoreConfig
from kvgraph.advisor.planner import GraphEvictionAdvisor
from kvgraph.advisor.replay.trace import AGENTS_SERVICE, HostLink
from kvgraph.graph.wire.events import HOLD_ENDS
from kvgraph.hooks.vllm.patches import bind_scheduler
from kvgraph.hooks.vllm.tiers.worker import TierMetadata, TierWorkerMetadata

from ..paper.paper_engine import BLOCK_SIZE, PaperEngine, Shape
from ..paper.paper_model import LOADS, SPILLS, Batch, aggregated, runner_output
from ..recorded.agents_requests import SHRINK, AgentRequest
from ..serving.cache_ledger import Books
from ..serving.completions import Answer
from ..serving.vllm_server import HINTS
from .closed_pass import LONGEST_FIRST, ClosedAnswer, ClosedTurn, HoldCounts

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
    from vllm.v1.request import Request


@dataclass(frozen=True, slots=True)
class PaperArm:
    name: str
    stock: bool = False  # without our connector
    longest_first: bool = False  # who waits starts by the longest cached prefix: SGLang's order
    hold: bool = False  # whether new sessions wait for room
    hinted: bool = False  # whether clients name sessions, and say when they end or wait for a tool
    layered: bool = False  # whether they say where tools and rules stand, and are believed
    unprotected: bool = False  # whether nothing is protected, whatever is said
    host: float = 0.0  # blocks of host memory, for each block of the pool
    ahead: bool = False  # it brings back what requests that wait lack, before their turn
    # that memory takes all that goes and drops the oldest: nothing is known of it
    plain: bool = False

    @property
    def hosted(self) -> bool:
        return self.host > 0.0


PAPER_STOCK: Final = PaperArm("stock", stock=True)
PAPER_LPM: Final = PaperArm("lpm", stock=True, longest_first=True)
PAPER_OFF: Final = PaperArm("off")
PAPER_HOLD: Final = PaperArm("hold", hold=True)
PAPER_TOLD: Final = PaperArm("hold_told", hold=True, hinted=True)
PAPER_HOST_LRU: Final = PaperArm("host_lru", host=1.0, plain=True)
PAPER_HOST_HOLD: Final = PaperArm("host_hold", host=1.0, hold=True)
PAPER_QUIET_TIERS: Final = PaperArm("quiet_tiers", host=1.0)
PAPER_QUEUED_TIERS: Final = PaperArm("queued_tiers", host=1.0, ahead=True)
PAPER_TIERS: Final = PaperArm("tiers", host=1.0, hinted=True)
PAPER_ARMS: Final = (
    PAPER_STOCK, PAPER_LPM, PAPER_OFF, PAPER_HOLD, PAPER_TOLD, PAPER_HOST_LRU, PAPER_HOST_HOLD,
)  # fmt: skip


TOLD_S: Final = 0.5  # between rounds of the sidecar
_QUEUE: Final = 1 << 20  # events: none is dropped between two rounds


class PaperSidecar:
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
        if self._side.holding is None:
            return None
        report = self._side.holding.report()
        ends = dict(zip(HOLD_ENDS, report.released, strict=True))
        return HoldCounts(report.held, report.not_held, report.longest_s, report.waited_s, ends)


_LANES: Final = (LOADS, SPILLS)  # a link carries both directions at once


class PaperLink:
    """Moves blocks there and back, in each direction one job after the other."""

    def __init__(self, engine: PaperEngine, link: HostLink | None = None) -> None:
        self._engine = engine
        (self._worker,) = engine.workers
        self._block_s = (link or HostLink()).seconds(1, BLOCK_SIZE * SHRINK)
        self._free_at = dict.fromkeys(_LANES, 0.0)  # when the job that leads a lane may begin

    def order(self, step: SchedulerOutput, now: float) -> None:
        """Take a step's orders; they begin at ``now``, behind those under way."""
        metadata = step.kv_connector_metadata
        for lane in _LANES:
            if self._worker.leading(lane) is None:
                self._free_at[lane] = now
        if isinstance(metadata, TierMetadata):
            self._worker.submit(metadata.work, self._worker.forwards)

    def reported(
        self, step: SchedulerOutput, tokens: dict[str, list[int]], now: float
    ) -> ModelRunnerOutput:
        batch = Batch(step, {}, [self._said(now)], runner_output(tokens))
        return aggregated(batch, self._engine.aggregator)

    def _said(self, now: float) -> KVConnectorOutput:
        from vllm.v1.outputs import KVConnectorOutput

        self._move(now)
        self._worker.forwards += 1
        finished, failed = self._worker.answers.take_loaded()
        answer = self._worker.answers.take_answer()
        return KVConnectorOutput(
            finished_recving=finished,
            invalid_block_ids=failed,
            kv_connector_worker_meta=TierWorkerMetadata(answer) if answer else None,
        )

    def _move(self, now: float) -> None:
        for lane in _LANES:
            while (copies := self._worker.leading(lane)) is not None:
                ends = self._free_at[lane] + copies * self._block_s
                if ends > now:
                    break
                self._free_at[lane] = ends
                for _half in range(2):
                    self._worker.advance(lane)


_IDLE_S: Final = 0.05  # a step that schedules nothing; chosen


class Asked(Protocol):
    @property
    def turn(self) -> ClosedTurn:
        """What it asks, and what is answered."""


@dataclass(frozen=True, slots=True)
class PaperService:
    """How fast a model is: ``prefill`` tokens a second, of at most ``step_tokens`` in a step;
    ``step_s`` seconds of any step, ``decode_s`` at least of one in which somebody decodes.
    """

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


@dataclass(frozen=True, slots=True)
class Sent:
    user: int
    turn: ClosedTurn
    at_s: float


class Crowd(ABC):
    """Those who ask, each for itself: no turn before the answer to the one before."""

    def __init__(self, due: Iterable[tuple[float, int]] = ()) -> None:
        self._due = list(due)  # when which user asks next
        heapq.heapify(self._due)

    @property
    def next_s(self) -> float:
        """When somebody asks next; infinite while all wait for answers, or are done."""
        return self._due[0][0] if self._due else math.inf

    def plan(self, at_s: float, user: int) -> None:
        heapq.heappush(self._due, (at_s, user))

    def due(self, now: float) -> Iterator[Sent]:
        """What is asked by now, in order; told once."""
        while self._due and self._due[0][0] <= now:
            at, user = heapq.heappop(self._due)
            yield from (Sent(user, turn, at) for turn in self.asks(user))

    @abstractmethod
    def asks(self, user: int) -> Iterator[ClosedTurn]:
        """What a user asks now."""

    @abstractmethod
    def answered(self, sent: Sent, now: float) -> None:
        """One got its answer."""


class PaperLoop:
    def __init__(
        self,
        base: VllmConfig,
        arm: PaperArm,
        blocks: int,
        crowd: Crowd,
        service: PaperService = AGENTS,
        pace: float = 1.0,
        books: Books | None = None,
    ) -> None:
        self._arm, self._crowd, self._service, self._pace = arm, crowd, service, pace
        self.now = 0.0
        warm = int(arm.host * blocks) if arm.hosted else None
        shape = Shape(blocks=blocks, warm=warm, plain=arm.plain, ahead=arm.ahead, stock=arm.stock)
        config = service.config(base, arm.longest_first)
        if books is not None:
            config = _with_events(config)
        # An engine believes its callers by default, or in everything.
        with patch.dict(os.environ, {HINTS: "all"} if arm.layered else {}):
            self.engine = PaperEngine(config, shape, clock=lambda: self.now)
        self._scheduler = self.engine.scheduler
        if books is not None:
            self._scheduler.kv_event_publisher = _Booked(books)
        self._link = PaperLink(self.engine) if self.engine.has_tiers else None
        self.sidecar = None if arm.stock else PaperSidecar(self.engine, arm, lambda: self.now)
        self.unanswered: dict[str, Unanswered] = {}
        self._numbers = itertools.count()
        self.answers: list[ClosedAnswer] = []

    def run(self, end_s: float = math.inf) -> None:
        while self.now < end_s and (self._scheduler.has_requests() or self._crowd.next_s < end_s):
            for sent in self._crowd.due(self.now):
                self._send(sent)
            if self.sidecar is not None:
                self.sidecar.turn()
            if self._scheduler.has_requests():
                self._step()
            else:
                self.now = self._crowd.next_s

    def held(self) -> HoldCounts | None:
        return self.sidecar.held() if self.sidecar is not None else None

    def _send(self, sent: Sent) -> None:
        asked = sent.turn.request
        name = f"{asked.name}#{next(self._numbers)}"
        self.unanswered[name] = Unanswered(sent)
        self._scheduler.add_request(self.request(name, asked))

    def request(self, name: str, asked: AgentRequest) -> Request:
        session = asked.session if self._arm.hinted else None
        make = self.engine.make
        request = make(name, list(asked.prompt), len(asked.answer), session_id=session)
        if self._arm.hinted:
            said = asked.body(self._pace, True, self._arm.layered)
            request.kv_transfer_params = said.get("kv_transfer_params")
        return request

    def _step(self) -> None:
        order = self._scheduler.schedule()
        tokens, seconds = self._service.step(self._scheduler, order, self.unanswered)
        if self._link is not None:
            self._link.order(order, self.now)
        self.now += seconds
        if self._link is None:
            done = runner_output(tokens)
        else:
            done = self._link.reported(order, tokens, self.now)
        outputs = self._scheduler.update_from_output(order, done)
        for each in itertools.chain.from_iterable(o.outputs for o in outputs.values()):
            self._said(each)

    def _said(self, output: Any) -> None:
        each = self.unanswered[output.request_id]
        if output.new_token_ids and each.first_s is None:
            each.first_s = self.now
        if output.prefill_stats is not None:
            each.cached = output.prefill_stats.num_cached_tokens
        if output.finish_reason is not None:
            del self.unanswered[output.request_id]
            self.answers.append(each.answer(self.now))
            self._crowd.answered(each.sent, self.now)


class _Booked:
    """Stands where vLLM publishes its KV events."""

    def __init__(self, books: Books) -> None:
        self._books = books

    def publish(self, batch: Any) -> None:
        self._books.apply(msgspec.msgpack.encode(batch))

    def shutdown(self) -> None:
        """Nothing was opened."""


def _with_events(config: VllmConfig) -> VllmConfig:
    from vllm.config import KVEventsConfig

    config = copy.copy(config)
    config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    return config


@dataclass(slots=True)
class Unanswered:
    sent: Sent
    first_s: float | None = None
    cached: int = 0

    @property
    def turn(self) -> ClosedTurn:
        return self.sent.turn

    def answer(self, now: float) -> ClosedAnswer:
        asked, at_s = self.turn.request, self.sent.at_s
        first = self.first_s if self.first_s is not None else now
        answer = Answer(
            asked.name, "", first - at_s, now - at_s, len(asked.prompt), self.cached,
            len(asked.answer),
        )  # fmt: skip
        return ClosedAnswer(at_s, self.turn.first, answer)
