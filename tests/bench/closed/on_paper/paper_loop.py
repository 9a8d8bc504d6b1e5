"""An engine on paper, those who ask it, and its sidecar, on one clock.

Scheduler, cache manager, connector, hold, graph and planner are the real ones; a step takes what a
model of the service says. Nothing depends on how busy this machine is, and hours take seconds.
"""

from __future__ import annotations

import copy
import itertools
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from ...paper.paper_engine import PaperEngine, Shape
from ...paper.paper_model import runner_output
from ...recorded.agents_requests import AgentRequest
from ...serving.cache_ledger import Books
from ...serving.completions import Answer
from ...serving.vllm_server import HINTS
from ..closed_pass import ClosedAnswer
from ..closed_sidecar import HoldCounts
from ..closed_users import ClosedTurn
from .closed_paper_arms import PaperArm
from .closed_paper_link import PaperLink
from .closed_paper_sidecar import PaperSidecar
from .paper_service import AGENTS, PaperService

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request


@dataclass(frozen=True, slots=True)
class Sent:
    """A turn that somebody sends; ``at_s``: when it was due."""

    user: int
    turn: ClosedTurn
    at_s: float


class Crowd(Protocol):
    """Those who ask, each for itself: no turn before the answer to the one before."""

    @property
    def next_s(self) -> float:
        """When somebody asks next; infinite while all wait for answers, or are done."""

    def due(self, now: float) -> Iterator[Sent]:
        """Who asks by now, in order; told once."""

    def answered(self, sent: Sent, now: float) -> None:
        """One got its answer."""


class PaperLoop:
    """One engine, its crowd and its sidecar.

    Args:
        base: vLLM's configuration of an engine on paper.
        blocks: Of the pool, the null block among them.
        service: What steps take.
        pace: Seconds that a recorded second takes: callers scale what they expect by it.
        books: Where vLLM's KV events are booked; None: it makes none.
    """

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
        with _believed(arm.layered):
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
        """Until the time is up, or nobody asks any more."""
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
        """What the engine counted; None where nobody is held."""
        return self.sidecar.held() if self.sidecar is not None else None

    def _send(self, sent: Sent) -> None:
        asked = sent.turn.request
        name = f"{asked.name}#{next(self._numbers)}"
        self.unanswered[name] = Unanswered(sent)
        self._scheduler.add_request(self.request(name, asked))

    def request(self, name: str, asked: AgentRequest) -> Request:
        """What a client of this arm sends."""
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


@contextmanager
def _believed(everything: bool) -> Iterator[None]:
    """An engine that starts meanwhile believes its callers, by default or in everything."""
    before = os.environ.get(HINTS)
    if everything:
        os.environ[HINTS] = "all"
    try:
        yield
    finally:
        if everything and before is None:
            del os.environ[HINTS]
        elif everything and before is not None:
            os.environ[HINTS] = before


@dataclass(slots=True)
class Unanswered:
    """A request that is not answered."""

    sent: Sent
    first_s: float | None = None
    cached: int = 0

    @property
    def turn(self) -> ClosedTurn:
        """What it asks."""
        return self.sent.turn

    def answer(self, now: float) -> ClosedAnswer:
        """Its answer, which ends now."""
        asked, at_s = self.turn.request, self.sent.at_s
        first = self.first_s if self.first_s is not None else now
        answer = Answer(
            asked.name, "", first - at_s, now - at_s, len(asked.prompt), self.cached,
            len(asked.answer),
        )  # fmt: skip
        return ClosedAnswer(at_s, self.turn.first, answer)
