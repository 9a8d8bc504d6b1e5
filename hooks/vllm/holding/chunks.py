"""``PromptChunks``: keeps steps short while sessions compete, so that turns wait less."""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Final

from ..meters import LONGEST_S

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_KEPT: Final = 9  # latest steps of each kind; chosen
_LEAST_STEPS: Final = 2  # steps with prompts before any limit is set; chosen
_LEAST_CHUNK: Final = 16  # the limit is at least a 16th of a step's tokens; chosen
_NEARLY_WHOLE: Final = (
    2  # a step of half the most tokens takes nearly all its time for them; chosen
)


class StepCost:
    """Fits a straight line to the seconds that recent steps took, by their tokens, ``most`` at
    most. While one is scheduled, ``behind`` others are under way; see ``PrefillMeter``.

    Steps with few tokens, with more, and nearly full ones are kept apart: steps that only decode
    are alike, so a line through them is a line through noise, and while prompts are limited no step
    is full. In each kind, slow steps count as outliers, since a step that compiles is slow too.
    """

    def __init__(self, behind: int, most: int) -> None:
        self._tokens = deque([0] * (behind + 1), maxlen=behind + 1)
        self._most = most
        self._at: float | None = None  # of the step before; None: it may have been idle since
        # Tokens and seconds of the latest steps of each kind.
        self._few = deque[tuple[int, float]](maxlen=_KEPT)
        self._some = deque[tuple[int, float]](maxlen=_KEPT)
        self._whole = deque[tuple[int, float]](maxlen=_KEPT)

    def pause(self) -> None:
        """Note that the time until the next step is not a step's duration."""
        self._at = None

    def stepped(self, tokens: int, now: float) -> None:
        """Note a step of ``tokens`` tokens, scheduled now."""
        known = self._tokens
        if self._at is None:
            known.extend([0] * len(known))
            self._at = now
        took = now - self._at
        if known[0] and 0.0 < took < LONGEST_S:
            if known[0] * _NEARLY_WHOLE >= self._most:
                kind = self._whole
            else:
                kind = self._some if known[0] * _LEAST_CHUNK >= self._most else self._few
            kind.append((known[0], took))
        known.append(tokens)
        self._at = now

    def lasted(self, seconds: float) -> bool:
        """Return whether recent large steps took at least ``seconds``, outliers aside."""
        return sum(took >= seconds for _, took in (*self._some, *self._whole)) >= _LEAST_STEPS

    def line(self) -> tuple[float, float]:
        """Return seconds per step and per token, by the cheaper half; 0 until known."""
        n, s = _middle(self._few or self._some)
        # What a step takes in any case is told by the shortest kind, a token's price by the others.
        others = (*self._some, *self._whole) if self._few else self._whole
        longer = [each for each in others if each[0] > n]
        if len(longer) < _LEAST_STEPS:
            return 0.0, 0.0
        more = sorted(((tokens - n, took - s) for tokens, took in longer), key=_price)
        cheap = more[: (len(more) + 1) // 2]
        token_s = sum(took for _, took in cheap) / sum(tokens for tokens, _ in cheap)
        return max(0.0, s - n * _price(more[len(more) // 2])), max(0.0, token_s)


def _price(step: tuple[int, float]) -> float:
    tokens, took = step
    return took / tokens


def _middle(steps: deque[tuple[int, float]]) -> tuple[int, float]:
    """Tokens and seconds of the one that took neither long nor short; both 0 if there is none."""
    return sorted(steps, key=lambda each: each[1])[len(steps) // 2] if steps else (0, 0.0)


_CHUNK_S: Final = 0.125
"""Seconds of a step that one prompt may take. Chosen on a CPU engine; GPUs compute most whole steps
in little more."""
_WORTH: Final = 2.0  # a full step must take this many times one prompt's allowance; chosen


class PromptChunks:
    """Limits the share of a step that each prompt takes, by vLLM's
    ``long_prefill_token_threshold``, if this engine allows it (``are_limited``).

    A turn of a resident session computes a few tokens, but waits for the running step, and for each
    step of its answer. If long prompts make steps of seconds, it spends most of its time waiting.
    vLLM never limits a prompt that is alone. A limit set by an operator is left alone.
    """

    def __init__(self, scheduler: Scheduler, behind: int) -> None:
        self._config = config = scheduler.scheduler_config
        self._scheduler = scheduler
        self._witness: Request | None = None  # ran when the last step was scheduled
        self._most = int(scheduler.max_num_scheduled_tokens)
        self._times = StepCost(behind, self._most)
        # vLLM limits drafts by the same number, and fails where it cuts one that it filled up; a
        # prompt whose part is no longer than what must be left for the last one gets none at all.
        self._least = max(
            self._most // _LEAST_CHUNK,
            1 + int(getattr(scheduler, "num_spec_tokens", 0)),
            int(getattr(scheduler, "num_prefill_lookahead", 0)),
        )
        self._set = 0  # what we have set
        self._said = False
        # An image or a Mamba state may need more of a step than the limit leaves to it. A scheduler
        # without one of these attributes is of a vLLM that we do not know.
        self.are_limited = bool(
            getattr(config, "enable_chunked_prefill", False)
            and hasattr(config, "long_prefill_token_threshold")
            and hasattr(scheduler, "block_size")
            and not getattr(scheduler, "max_num_encoder_input_tokens", True)
            and not getattr(scheduler, "need_mamba_block_aligned_split", True)
        )

    def step(self, tokens: int, now: float, *, crowded: bool) -> None:
        """Limit the next steps' prompts while ``crowded``; after each step as sessions compete."""
        if self.are_limited:
            witness, running = self._witness, self._scheduler.running
            if witness is None or witness.is_finished():
                self._times.pause()  # all may have ended since: it may have been idle
            self._times.stepped(tokens, now)
            self._witness = running[-1] if running else None
            self._limit(self._fitting() if crowded and self._all_fit() else 0)

    def rest(self) -> None:
        """Remove the limit, until sessions compete again."""
        if self.are_limited:
            self._witness = None
            self._limit(0)

    def _all_fit(self) -> bool:
        """Whether what runs can be computed side by side. Where it cannot, each takes what another
        lacks, and loses it again; whole steps compute one prompt before the next.
        """
        scheduler = self._scheduler
        lacking = sum(each.num_tokens - each.num_computed_tokens for each in scheduler.running)
        free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return bool(lacking <= free * scheduler.block_size)

    def _fitting(self) -> int:
        if not (self._set or self._times.lasted(_WORTH * _CHUNK_S)):
            return 0  # a line may be wrong far from what it was drawn through, and costs more
        step_s, token_s = self._times.line()
        # Not less than any step takes: splitting at most doubles what a prompt's tokens cost.
        seconds = max(_CHUNK_S, step_s)
        if _WORTH * seconds >= token_s * self._most:
            return 0
        return max(int(seconds / token_s), self._least)

    def _limit(self, tokens: int) -> None:
        config = self._config
        if config.long_prefill_token_threshold != self._set:
            self.are_limited = False  # an operator or somebody else has set it: it is theirs
            return
        config.long_prefill_token_threshold = self._set = tokens
        if tokens and not self._said:
            self._said = True
            logger.info(
                "kvgraph: while new sessions wait, a prompt takes about %d of the %d tokens of a "
                "step, so that others wait less; --long-prefill-token-threshold sets another limit",
                tokens,
                self._most,
            )
