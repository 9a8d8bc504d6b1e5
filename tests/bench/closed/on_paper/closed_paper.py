"""The closed loop on vLLM's own scheduler above workers on paper, by a clock of its own.

Scheduler, cache manager, connector, hold, graph and planner are the real ones; a step takes what a
model of the service says. Nothing depends on how busy this machine is, and hours take seconds.
"""

from __future__ import annotations

import copy
import heapq
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from ....advisor.replay.closed.loop import AGENTS_SERVICE
from ...paper.paper_engine import PaperEngine, Shape
from ...paper.paper_model import runner_output
from ...recorded.agents_requests import SHRINK
from ...serving.completions import Answer
from ..closed_arms import LONGEST_FIRST, ClosedRun
from ..closed_pass import STARTING_S, Clock, ClosedAnswer, ClosedPass
from ..closed_sidecar import HoldCounts
from ..closed_users import ClosedTurn, Script
from .closed_paper_arms import PaperArm
from .closed_paper_link import PaperLink
from .closed_paper_sidecar import PaperSidecar

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

PREFILL: Final = AGENTS_SERVICE.prefill_tokens_per_s / SHRINK  # tokens a second
DECODE_S: Final = AGENTS_SERVICE.decode_s_per_token * SHRINK  # a token
"""The replay lab's service, in this fleet's smaller tokens."""

_IDLE_S: Final = 0.05  # a step that schedules nothing
_BATCH_TOKENS: Final = 192  # 180, what prefill reaches in one decode step, in whole blocks
_SEQUENCES: Final = 64  # no run with ``--best 20`` has more agents; chosen


def play_on_paper(
    base: VllmConfig,
    arm: PaperArm,
    blocks: int,
    users: Sequence[Script],
    clock: Clock,
    starting_s: float = STARTING_S,
) -> ClosedRun:
    """Every user plays its script until the time is up.

    Args:
        base: vLLM's configuration of an engine on paper.
        blocks: Of the pool, the null block among them.
        clock: In the service model's seconds, a recorded one each.
        starting_s: Users begin within so many of them, evenly.
    """
    loop = _PaperLoop(base, arm, blocks, users, clock, starting_s)
    try:
        loop.run()
        return ClosedRun(arm.name, len(users), loop.passed(), loop.held())
    finally:
        loop.engine.close()


class _PaperLoop:
    """One engine, its users and its sidecar, on one clock."""

    def __init__(
        self,
        base: VllmConfig,
        arm: PaperArm,
        blocks: int,
        users: Sequence[Script],
        clock: Clock,
        starting_s: float,
    ) -> None:
        self._arm, self._clock = arm, clock
        self.now = 0.0
        warm = blocks if arm.hosted else None
        shape = Shape(blocks=blocks, warm=warm, plain=arm.plain, stock=arm.stock)
        self.engine = PaperEngine(larger(base, arm.longest_first), shape, clock=lambda: self.now)
        self._scheduler = self.engine.scheduler
        self._link = PaperLink(self.engine) if self.engine.has_tiers else None
        sidecar = PaperSidecar
        self._sidecar = None if arm.stock else sidecar(self.engine, arm, lambda: self.now)
        self._scripts = [iter(script) for script in users]
        starts = ((starting_s * n / len(users), n) for n in range(len(users)))
        self._due: list[tuple[float, int]] = list(starts)
        self._open: dict[str, _Open] = {}
        self._numbers = itertools.count()
        self._answers: list[ClosedAnswer] = []

    def run(self) -> None:
        while self.now < self._clock.end_s:
            self._send_due()
            if self._sidecar is not None:
                self._sidecar.turn()
            if self._scheduler.has_requests():
                self._step()
            else:
                self.now = self._due[0][0]

    def passed(self) -> ClosedPass:
        waiting = tuple((each.turn.first, self.now - each.sent_s) for each in self._open.values())
        return ClosedPass(self._clock, tuple(self._answers), waiting, 0)

    def held(self) -> HoldCounts | None:
        return self._sidecar.held() if self._sidecar is not None else None

    def _send_due(self) -> None:
        while self._due and self._due[0][0] <= self.now:
            at, user = heapq.heappop(self._due)
            turn = next(self._scripts[user])
            name = f"{turn.request.name}#{next(self._numbers)}"
            request = self._request(name, turn)
            self._open[name] = _Open(user, turn, at)
            self._scheduler.add_request(request)

    def _request(self, name: str, turn: ClosedTurn) -> Request:
        asked = turn.request
        session = asked.session if self._arm.hinted else None
        make = self.engine.make
        request = make(name, list(asked.prompt), len(asked.answer), session_id=session)
        if self._arm.hinted:
            request.kv_transfer_params = asked.body(1.0, True).get("kv_transfer_params")
        return request

    def _step(self) -> None:
        order = self._scheduler.schedule()
        tokens, seconds = forced_step(self._scheduler, order, self._open)
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
        each = self._open[output.request_id]
        if output.new_token_ids and each.first_s is None:
            each.first_s = self.now
        if output.prefill_stats is not None:
            each.cached = output.prefill_stats.num_cached_tokens
        if output.finish_reason is None:
            return
        del self._open[output.request_id]
        heapq.heappush(self._due, (self.now + self._clock.pace * each.turn.pause_s, each.user))
        asked = each.turn.request
        first = each.first_s if each.first_s is not None else self.now
        answer = Answer(
            asked.name, "", first - each.sent_s, self.now - each.sent_s, len(asked.prompt),
            each.cached, len(asked.answer),
        )  # fmt: skip
        self._answers.append(ClosedAnswer(each.sent_s, each.turn.first, answer))


@dataclass(slots=True)
class _Open:
    """A request that is not answered."""

    user: int
    turn: ClosedTurn
    sent_s: float
    first_s: float | None = None
    cached: int = 0


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


def larger(base: VllmConfig, longest_first: bool) -> VllmConfig:
    config = copy.copy(base)
    config.model_config = copy.copy(base.model_config)
    config.scheduler_config = copy.copy(base.scheduler_config)
    config.model_config.max_model_len = 4096
    config.scheduler_config.max_model_len = 4096
    config.scheduler_config.max_num_batched_tokens = _BATCH_TOKENS
    config.scheduler_config.max_num_scheduled_tokens = None
    config.scheduler_config.max_num_seqs = _SEQUENCES
    config.scheduler_config.scheduler_cls = LONGEST_FIRST if longest_first else None
    return config
