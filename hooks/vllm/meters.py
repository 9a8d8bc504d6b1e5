"""When the sidecar must hear of the engine's news at once."""

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

_LEAST: Final = 1  # block; of a pool so small that the share is less than one


class UrgentFlush:
    """Has queued events sent at once that should not wait for the client's next tick, 0.2 s later.

    That is after a step once ``PRESSING_SHARE`` of the pool was stored since the last time: the
    next victims should be chosen with these blocks known. It is also when the last running request
    ends and as much was stored since: the next request may come at once, and should find advice
    that knows how this one ended.
    """

    def __init__(self, pool_blocks: int, tell: Callable[[], None]) -> None:
        self._much = max(_LEAST, int(PRESSING_SHARE * pool_blocks))
        self._tell = tell
        self._at_step = self._at_rest = 0  # blocks stored until the last time

    @property
    def due_at(self) -> int:
        """Blocks stored since the engine's start from which on events are sent after a step."""
        return self._at_step + self._much

    def after_step(self, stored: int) -> None:
        """Send if it is due after a step; ``stored``: blocks stored since the engine's start."""
        if stored - self._at_step >= self._much:
            self._at_step = stored
            self._tell()

    def at_rest(self, stored: int) -> None:
        """The same once no request runs any more."""
        if stored - self._at_rest >= self._much:
            self._at_rest = stored
            self._tell()


# ``PrefillMeter``: how fast an engine computes prompts, told from when its steps are scheduled.

SHARE: Final = 0.2  # weight of the newest sample in the mean; chosen, as in ``TransferCosts``
LEAST_TOKENS: Final = 64  # steps with fewer say little about prefill; chosen
LONGEST_S: Final = 10.0  # what lies longer apart is no step but a pause; chosen


class PrefillMeter:
    """Running mean of the tokens per second of steps that do not only decode.

    vLLM does not tell a connector without workers when a step is over. But while a request goes on,
    the next step is scheduled as soon as one is over: the time between two is what one took.
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


# ``PromptDemand``: how many blocks the next step can take for prompts.


class PromptDemand:
    """Follows the prompts that vLLM looked up and has not computed yet.

    A step takes at most one block for each request that decodes, and those of prompts that were
    looked up: vLLM schedules no request before it has asked what the prefix cache holds of it.
    A step computes at most its token budget of them. A load takes all of its blocks at once,
    whatever the budget.
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
        """Blocks of all groups that the next step can take: for so many requests that decode, for
        prompts, and for loads, those of prompts and so many others that are ``fetched``.
        """
        take, loads = self._groups_take, fetched + self.loaded
        return take * decoding, take * self.prompts, take * loads

    def looked_up(self, request: Request, computed_tokens: int, to_load: int = 0) -> None:
        """Note that a step may begin to compute what ``request`` lacks, or to load ``to_load``
        tokens of it.
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
