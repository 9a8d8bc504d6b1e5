"""What a step of a simulated model takes, and what it says."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from kvgraph.advisor.replay.trace import AGENTS_SERVICE

from ...recorded.agents_requests import SHRINK
from ..closed_arms import LONGEST_FIRST
from ..closed_users import ClosedTurn

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_IDLE_S: Final = 0.05  # a step that schedules nothing; chosen


class Asked(Protocol):
    """A request whose answer is known."""

    @property
    def turn(self) -> ClosedTurn:
        """What it asks, and what is answered."""


@dataclass(frozen=True, slots=True)
class PaperService:
    """How fast a model is, in seconds and tokens.

    Attributes:
        prefill: Tokens a second.
        decode_s: Of a step in which somebody decodes, at least.
        step_tokens: That a step computes at most.
        sequences: Requests that run at once at most.
        step_s: Of any step, whatever it computes.
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
)
"""The replay lab's service, in this fleet's smaller tokens."""
