"""Meters of an engine's steps: which events are urgent, prefill speed, blocks of prompts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from ...graph.wire.advice import PRESSING_SHARE
from ...graph.wire.events import AnyEvent, Pressure
from .tap import Cached

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

_LEAST: Final = 1  # blocks; for a pool so small that the share is less than one


class UrgentFlush:
    """Sends queued events at once when they should not wait for the client's next tick, 0.2 s
    later.

    They are urgent after a step if ``PRESSING_SHARE`` of the pool was stored since the last urgent
    send: the next victims should be chosen with these blocks known. They are also urgent when the
    last running request ends and as much was stored: the next request may come at once and should
    find advice that accounts for that end.
    """

    def __init__(self, pool_blocks: int, tell: Callable[[], None]) -> None:
        self._much = max(_LEAST, int(PRESSING_SHARE * pool_blocks))
        self._tell = tell
        self._at_step = self._at_rest = 0  # blocks stored until the last time

    @property
    def due_at(self) -> int:
        """Number of blocks stored at which events are sent after a step."""
        return self._at_step + self._much

    def after_step(self, stored: int) -> None:
        """Send what is urgent after a step; ``stored``: blocks since the engine's start."""
        if stored - self._at_step >= self._much:
            self._at_step = stored
            self._tell()

    def at_rest(self, stored: int) -> None:
        """Send what is urgent now that no request runs; ``stored`` as in ``after_step``."""
        if stored - self._at_rest >= self._much:
            self._at_rest = stored
            self._tell()


SHARE: Final = 0.2  # weight of the newest sample in the mean; chosen, as in ``TransferCosts``
LEAST_TOKENS: Final = 64  # steps with fewer say little about prefill; chosen
LONGEST_S: Final = 10.0  # a longer time between two steps is a pause; chosen


class PrefillMeter:
    """Running mean of the tokens per second in steps that compute prompts.

    vLLM does not tell a connector without workers when a step is over. But while a request runs,
    the next step is scheduled as soon as one is over, so the time between two is a step's duration.
    """

    def __init__(self, behind: int) -> None:
        # Steps under way while another is scheduled: 1 with asynchronous scheduling, else 0.
        self.behind = behind
        self.tokens_per_s = 0.0  # 0 before the first sample
        self._nothing = [0] * (behind + 1)
        self._tokens = deque(self._nothing, maxlen=behind + 1)
        self._at = 0.0
        self._witness: str | None = None

    @classmethod
    def of(cls, config: VllmConfig) -> PrefillMeter:
        return cls(1 if getattr(config.scheduler_config, "async_scheduling", False) else 0)

    def told_with(self, pressure: Callable[[], Pressure]) -> Callable[[], AnyEvent]:
        return lambda: replace(pressure(), prefill_tokens_per_s=round(self.tokens_per_s, 1))

    def stepped(self, tokens: int, running: dict[str, Any], now: float) -> None:
        known, computed = self._tokens, self._tokens[0]
        if self._witness not in running:  # all may have ended since: it may have been idle
            known.extend(self._nothing)
        elif computed >= LEAST_TOKENS and 0 < (took := now - self._at) < LONGEST_S:
            mean, sample = self.tokens_per_s, computed / took
            self.tokens_per_s = mean + SHARE * (sample - mean) if mean else sample
        known.append(tokens)
        self._at = now
        self._witness = next(reversed(running), None)


class PromptDemand:
    """Tracks the prompts that vLLM has looked up and not computed yet.

    A step allocates at most one block for each decoding request, and the blocks of prompts that
    were looked up: vLLM schedules no request before it has looked up its prefix. A step computes at
    most its token budget of these. A load allocates all of its blocks at once, whatever the budget.
    """

    def __init__(self, block_size: int, groups_take: int = 1) -> None:
        self.prompts = 0  # blocks of the observed group that looked-up prompts still need
        self._block_size, self._groups_take = block_size, groups_take
        # by request id, the blocks of its tokens when it was looked up
        self.needs: dict[str, int] = {}
        self._has: dict[str, int] = {}  # and how many of them are computed
        self._loads: dict[str, int] = {}  # and how many of them a load can fill, if any
        self.loaded = 0  # blocks that loads of them can fill

    def most(self, decoding: int, fetched: int = 0) -> tuple[int, int, int]:
        """Return how many blocks of all groups the next step can allocate: for ``decoding``
        requests, for prompts, and for loads, counting prompts' loads and ``fetched`` blocks of
        other loads.
        """
        take, loads = self._groups_take, fetched + self.loaded
        return take * decoding, take * self.prompts, take * loads

    def looked_up(self, request: Request, computed_tokens: int, to_load: int = 0) -> None:
        """Note that a step may start to compute the missing tokens of ``request``, or to load
        ``to_load`` of them.
        """
        self.finished(request.request_id)
        if to_load:
            self._loads[request.request_id] = blocks = to_load // self._block_size
            self.loaded += blocks
        needs = 1 + request.num_tokens // self._block_size
        has = computed_tokens // self._block_size
        self.needs[request.request_id], self._has[request.request_id] = needs, has
        self.prompts += needs - has

    def cached(self, cached: Iterable[Cached]) -> None:
        needs = self.needs
        if not needs:
            return
        for request, _, _, end in cached:
            if request.request_id in needs:
                self._computed(request.request_id, end)

    def finished(self, request_id: str) -> None:
        needs = self.needs.pop(request_id, None)
        self.loaded -= self._loads.pop(request_id, 0)
        if needs is not None:
            self.prompts -= needs - self._has.pop(request_id)

    def _computed(self, request_id: str, end: int) -> None:
        if end >= self.needs[request_id] - 1:
            self.finished(request_id)
        else:
            self.prompts -= end - self._has[request_id]
            self._has[request_id] = end
