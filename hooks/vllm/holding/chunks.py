"""``PromptChunks``: keeps steps short while sessions crowd, so that turns wait less for prompts."""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Final

from ..meters import LEAST_TOKENS, LONGEST_S

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_LATEST: Final = 1 / 32  # weight of the newest step; chosen
_LEAST_STEPS: Final = 2  # that are measured before anything is limited; chosen
_ALIKE: Final = 0.1  # if tokens deviate by less than this share of their mean, no line fits; chosen


class StepTimes:
    """Fits a straight line to the seconds that recent steps took, by their tokens.

    Args:
        behind: Steps that are under way while another is scheduled: 1 with asynchronous
            scheduling, else 0.
    """

    def __init__(self, behind: int) -> None:
        self._tokens = deque([0] * (behind + 1), maxlen=behind + 1)
        self._at: float | None = None  # of the step before; None: it may have been idle since
        self._steps = 0
        # Weighted means of tokens, of their squares, of seconds, and of tokens times seconds.
        self._n = self._nn = self._s = self._ns = 0.0

    def pause(self) -> None:
        """Note that the time until the next step is not what a step took."""
        self._at = None

    def stepped(self, tokens: int, now: float) -> None:
        """Note a step of so many tokens, scheduled now."""
        known = self._tokens
        if self._at is None:
            known.extend([0] * len(known))
            self._at = now
        took = now - self._at
        if known[0] and 0.0 < took < LONGEST_S:
            self._steps += 1
            weight = max(_LATEST, 1 / self._steps)
            n = known[0]
            self._n += weight * (n - self._n)
            self._nn += weight * (n * n - self._nn)
            self._s += weight * (took - self._s)
            self._ns += weight * (n * took - self._ns)
        known.append(tokens)
        self._at = now

    def line(self) -> tuple[float, float]:
        """Seconds that any step takes, and seconds per token; both 0 until enough is known."""
        if self._steps < _LEAST_STEPS:
            return 0.0, 0.0
        variance = self._nn - self._n * self._n
        if variance < (_ALIKE * self._n) ** 2:  # then all the time counts as the tokens'
            return 0.0, self._s / self._n if self._n >= LEAST_TOKENS else 0.0
        token_s = max(0.0, (self._ns - self._n * self._s) / variance)
        return max(0.0, self._s - token_s * self._n), token_s


_CHUNK_S: Final = 0.125
"""Seconds of a step that one prompt may take. Chosen on a CPU engine; GPUs compute most whole steps
in less, and longer ones in parts that are still large."""
_AT_LEAST: Final = 1.0
"""Or so many times what any step takes, if that is longer: then splitting a prompt at most doubles
the time that its tokens take. Chosen."""
_LEAST_CHUNK: Final = 16  # the limit is at least this part of a step's tokens, a 16th; chosen


class PromptChunks:
    """Limits what each prompt takes of a step, by vLLM's own ``long_prefill_token_threshold``.

    A turn of a resident session computes a few tokens, but waits for the step under way, and for
    each step of its answer. Where a long prompt makes steps of seconds, it waits for little else.
    vLLM limits no prompt that is alone. A limit that an operator has set is left alone.

    Attributes:
        are_limited: Whether this engine's prompts can be limited.
    """

    def __init__(self, scheduler: Scheduler, behind: int) -> None:
        self._config = config = scheduler.scheduler_config
        self._scheduler = scheduler
        self._witness: Request | None = None  # ran when the last step was scheduled
        self._most = int(scheduler.max_num_scheduled_tokens)
        self._times = StepTimes(behind)
        self._said = False
        # An image or a Mamba state may need more of a step than the limit leaves to it. A scheduler
        # without one of these attributes is of a vLLM that we do not know.
        self.are_limited = bool(
            getattr(config, "enable_chunked_prefill", False)
            and not getattr(config, "long_prefill_token_threshold", True)
            and not getattr(scheduler, "max_num_encoder_input_tokens", True)
            and not getattr(scheduler, "need_mamba_block_aligned_split", True)
        )

    def step(self, tokens: int, now: float, *, crowded: bool) -> None:
        """Limit the next steps' prompts while sessions crowd; called after each step of a crowd."""
        if self.are_limited:
            witness, running = self._witness, self._scheduler.running
            if witness is None or witness.is_finished():
                self._times.pause()  # all may have ended since: it may have been idle
            self._times.stepped(tokens, now)
            self._witness = running[-1] if running else None
            self._limit(self._fitting() if crowded else 0)

    def rest(self) -> None:
        """Limit nothing, until there are steps of a crowd again."""
        if self.are_limited:
            self._witness = None
            self._limit(0)

    def _fitting(self) -> int:
        step_s, token_s = self._times.line()
        seconds = max(_CHUNK_S, _AT_LEAST * step_s)
        if seconds >= token_s * self._most:
            return 0
        return max(int(seconds / token_s), self._most // _LEAST_CHUNK)

    def _limit(self, tokens: int) -> None:
        self._config.long_prefill_token_threshold = tokens
        if tokens and not self._said:
            self._said = True
            logger.info(
                "kvgraph: while new sessions wait, a prompt takes about %d of the %d tokens of a "
                "step, so that others wait less; --long-prefill-token-threshold sets another limit",
                tokens,
                self._most,
            )
