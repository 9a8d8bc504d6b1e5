"""An engine on paper, those who ask it, and its sidecar, on one clock."""

from __future__ import annotations

import copy
import heapq
import itertools
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

import msgspec
from kvgraph.advisor.config.config import Config
from kvgraph.advisor.config.sections import PolicyConfig, ScoreConfig
from kvgraph.graph.wire.events import HOLD_ENDS
from kvgraph.hooks.vllm.patches import bind_scheduler

from ..paper.paper_engine import Shape
from ..paper.timed_engine import AGENTS, PaperService, PaperSidecar, TimedEngine
from ..recorded.agents_requests import AgentRequest
from ..serving.cache_ledger import Books
from ..serving.completions import Answer
from ..serving.vllm_server import HINTS
from .closed_pass import ClosedAnswer, ClosedTurn, HoldCounts

if TYPE_CHECKING:
    from vllm.config import VllmConfig
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
    # that memory takes all that goes and drops the oldest: nothing is known of it
    plain: bool = False

    @property
    def hosted(self) -> bool:
        return self.host > 0.0


PAPER_STOCK: Final = PaperArm("stock", stock=True)
PAPER_LPM: Final = PaperArm("lpm", stock=True, longest_first=True)
PAPER_OFF: Final = PaperArm("off")
PAPER_HOLD: Final = PaperArm("hold", hold=True)
PAPER_TOLD: Final = PaperArm("hold_told", hold=True, hinted=True, layered=True)
PAPER_HOST_LRU: Final = PaperArm("host_lru", host=1.0, plain=True)
PAPER_HOST_HOLD: Final = PaperArm("host_hold", host=1.0, hold=True)
PAPER_QUIET_TIERS: Final = PaperArm("quiet_tiers", host=1.0)
PAPER_TIERS: Final = PaperArm("tiers", host=1.0, hinted=True, layered=True)
PAPER_ARMS: Final = (
    PAPER_STOCK, PAPER_LPM, PAPER_OFF, PAPER_HOLD, PAPER_TOLD, PAPER_HOST_LRU, PAPER_HOST_HOLD,
)  # fmt: skip


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
        self._arm, self._crowd, self._pace = arm, crowd, pace
        warm = int(arm.host * blocks) if arm.hosted else None
        shape = Shape(blocks=blocks, warm=warm, plain=arm.plain, stock=arm.stock)
        config = service.config(base, arm.longest_first)
        if books is not None:
            config = _with_events(config)
        # An engine believes its callers by default, or in everything.
        with patch.dict(os.environ, {HINTS: "all"} if arm.layered else {}):
            self.engine = TimedEngine(config, shape, service)
        self._scheduler = self.engine.scheduler
        if books is not None:
            self._scheduler.kv_event_publisher = _Booked(books)
        if arm.hold:
            bind_scheduler(self._scheduler)
        self.sidecar = None if arm.stock else self._advised()
        self.unanswered: dict[str, Unanswered] = {}
        self._numbers = itertools.count()
        self.answers: list[ClosedAnswer] = []

    @property
    def now(self) -> float:
        return self.engine.now

    def run(self, end_s: float = math.inf) -> None:
        engine = self.engine
        while engine.now < end_s and (self._scheduler.has_requests() or self._crowd.next_s < end_s):
            for sent in self._crowd.due(engine.now):
                self._send(sent)
            if self.sidecar is not None:
                self.sidecar.turn()
            if self._scheduler.has_requests():
                for each in engine.take_step(self.unanswered)[1]:
                    self._said(each)
            else:
                engine.now = self._crowd.next_s

    def held(self) -> HoldCounts | None:
        if self._arm.stock or self.engine.side.holding is None:
            return None
        report = self.engine.side.holding.report()
        ends = dict(zip(HOLD_ENDS, report.released, strict=True))
        return HoldCounts(report.held, report.not_held, report.longest_s, report.waited_s, ends)

    def _advised(self) -> PaperSidecar:
        policy = PolicyConfig(name="lru") if self._arm.plain else PolicyConfig()
        none = ScoreConfig(protected_share=0.0, inferred_share=0.0)
        config = Config(policy=policy, score=none if self._arm.unprotected else ScoreConfig())
        name = self.engine.side.hello().engine
        return PaperSidecar({name: self.engine}, config, lambda: self.now)

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
