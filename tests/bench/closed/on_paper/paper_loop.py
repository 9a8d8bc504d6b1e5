"""An engine on paper, those who ask it, and its sidecar, on one clock.

Scheduler, cache manager, connector, hold, graph and planner are the real ones; a step takes what a
model of the service says. Nothing depends on how busy this machine is, and hours take seconds.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from ....advisor.replay.closed.loop import AGENTS_SERVICE
from ...paper.paper_engine import PaperEngine, Shape
from ...paper.paper_model import runner_output
from ...recorded.agents_requests import SHRINK, AgentRequest
from ...serving.completions import Answer
from ..closed_arms import LONGEST_FIRST
from ..closed_pass import ClosedAnswer
from ..closed_sidecar import HoldCounts
from ..closed_users import ClosedTurn
from .closed_paper_arms import PaperArm
from .closed_paper_link import PaperLink
from .closed_paper_sidecar import PaperSidecar

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

PREFILL: Final = AGENTS_SERVICE.prefill_tokens_per_s / SHRINK  # tokens a second
DECODE_S: Final = AGENTS_SERVICE.decode_s_per_token * SHRINK  # a token
"""The replay lab's service, in this fleet's smaller tokens."""

SEQUENCES: Final = 64  # that run at once at most; no run with ``--best 20`` has more agents; chosen

_IDLE_S: Final = 0.05  # a step that schedules nothing; chosen
_BATCH_TOKENS: Final = 192  # 180, what prefill reaches in one decode step, in whole blocks


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
        sequences: Requests that run at once at most.
    """

    def __init__(
        self,
        base: VllmConfig,
        arm: PaperArm,
        blocks: int,
        crowd: Crowd,
        sequences: int = SEQUENCES,
    ) -> None:
        self._arm, self._crowd = arm, crowd
        self.now = 0.0
        warm = blocks if arm.hosted else None
        shape = Shape(blocks=blocks, warm=warm, plain=arm.plain, stock=arm.stock)
        config = for_agents(base, arm.longest_first, sequences)
        self.engine = PaperEngine(config, shape, clock=lambda: self.now)
        self._scheduler = self.engine.scheduler
        self._link = PaperLink(self.engine) if self.engine.has_tiers else None
        self._sidecar = None if arm.stock else PaperSidecar(self.engine, arm, lambda: self.now)
        self.unanswered: dict[str, Unanswered] = {}
        self._numbers = itertools.count()
        self.answers: list[ClosedAnswer] = []

    def run(self, end_s: float = math.inf) -> None:
        """Until the time is up, or nobody asks any more."""
        while self.now < end_s and (self._scheduler.has_requests() or self._crowd.next_s < end_s):
            for sent in self._crowd.due(self.now):
                self._send(sent)
            if self._sidecar is not None:
                self._sidecar.turn()
            if self._scheduler.has_requests():
                self._step()
            else:
                self.now = self._crowd.next_s

    def held(self) -> HoldCounts | None:
        """What the engine counted; None where nobody is held."""
        return self._sidecar.held() if self._sidecar is not None else None

    def _send(self, sent: Sent) -> None:
        asked = sent.turn.request
        name = f"{asked.name}#{next(self._numbers)}"
        self.unanswered[name] = Unanswered(sent)
        self._scheduler.add_request(self._request(name, asked))

    def _request(self, name: str, asked: AgentRequest) -> Request:
        session = asked.session if self._arm.hinted else None
        make = self.engine.make
        request = make(name, list(asked.prompt), len(asked.answer), session_id=session)
        if self._arm.hinted:
            request.kv_transfer_params = asked.body(1.0, True).get("kv_transfer_params")
        return request

    def _step(self) -> None:
        order = self._scheduler.schedule()
        tokens, seconds = forced_step(self._scheduler, order, self.unanswered)
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


class Asked(Protocol):
    """A request whose answer is known."""

    @property
    def turn(self) -> ClosedTurn:
        """What it asks, and what is answered."""


def forced_step(
    scheduler: Any, order: Any, asked: Mapping[str, Asked]
) -> tuple[dict[str, list[int]], float]:
    """The tokens that a step says, by request, as the answers have them; the seconds it takes."""
    tokens: dict[str, list[int]] = {}
    prefilled, decodes = 0, False
    for name, count in order.num_scheduled_tokens.items():
        request = scheduler.requests[name]
        said = request.num_tokens - request.num_prompt_tokens
        decodes = decodes or said > 0
        prefilled += count if not said else 0
        whole = request.num_computed_tokens >= request.num_tokens
        tokens[name] = [asked[name].turn.request.answer[said]] if whole else []
    return tokens, _step_s(prefilled, decodes)


def _step_s(prefilled: int, decodes: bool) -> float:
    if not prefilled and not decodes:
        return _IDLE_S
    return max(prefilled / PREFILL, DECODE_S if decodes else 0.0)


def for_agents(base: VllmConfig, longest_first: bool, sequences: int = SEQUENCES) -> VllmConfig:
    """``base`` for prompts of recorded agents, in steps as long as the service model's."""
    config = copy.copy(base)
    config.model_config = copy.copy(base.model_config)
    config.scheduler_config = copy.copy(base.scheduler_config)
    config.model_config.max_model_len = 4096
    config.scheduler_config.max_model_len = 4096
    config.scheduler_config.max_num_batched_tokens = _BATCH_TOKENS
    config.scheduler_config.max_num_scheduled_tokens = None
    config.scheduler_config.max_num_seqs = sequences
    config.scheduler_config.scheduler_cls = LONGEST_FIRST if longest_first else None
    return config
