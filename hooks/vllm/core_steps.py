"""``CoreSteps``: does in the compiled core what every step of an engine has in common.

Decisions stay in Python. The core recognises a step without anything to decide, because nothing has
changed since the last one, and handles it in one call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from ..link.mailbox import Clock, Mailbox
from .core_index import CoreIndex
from .meters import LEAST_TOKENS, LONGEST_S, SHARE, PrefillMeter, PromptDemand, UrgentFlush

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

    from ..._engine import Core
    from ...graph.wire.advice import EvictionRanking
    from .free_queue.arranger import FreeQueueArranger
    from .groups import ObservedGroup
    from .holding.holding import Holding
    from .index import BlockIndex
    from .observer import ChangeFeed, EngineObserver

_TAKE: Final = 1  # take the pool's changes, as in core/engine/steps.hpp
_TELL: Final = 2
_BEHIND: Final = 4
ARRANGE: Final = 8  # perhaps rearrange: ``finish`` checks whether it is due
_HOLD: Final = 16
DECIDES: Final = _TAKE | ARRANGE  # of these, the work that changes the queue, or may


class CoreDemand(PromptDemand):
    """A ``PromptDemand`` counted by the compiled core, which sees what is computed."""

    def __init__(self, core: Core, block_size: int, groups_take: int) -> None:
        self._core, self._block_size, self._groups_take = core, block_size, groups_take

    @property
    def prompts(self) -> int:  # type: ignore[override]
        return self._core.prompts

    @property
    def loaded(self) -> int:  # type: ignore[override]
        return self._core.loaded

    def looked_up(self, request: Request, computed_tokens: int, to_load: int = 0) -> None:
        """Note that a step may compute what ``request`` lacks; see ``PromptDemand``."""
        size = self._block_size
        needs, has = 1 + request.num_tokens // size, computed_tokens // size
        self._core.looked_up(request.request_id, needs, has, to_load // size)

    def cached(self, cached: Any) -> None:
        """Does nothing: the core itself sees which blocks are computed."""

    def finished(self, request_id: str) -> None:
        self._core.finished(request_id)


class CoreMeter(PrefillMeter):
    """A ``PrefillMeter`` that ``Core.step`` updates."""

    def __init__(self, core: Core, behind: int) -> None:
        self._core, self.behind = core, behind

    @property
    def tokens_per_s(self) -> float:  # type: ignore[override]
        """Mean prefill speed in tokens per second; 0 before the first sample."""
        return self._core.tokens_per_s

    def stepped(self, tokens: int, running: dict[str, Any], now: float) -> None:
        """Does nothing: ``Core.step`` measures the step."""


def new_demand(index: BlockIndex, group: ObservedGroup) -> PromptDemand:
    if isinstance(index, CoreIndex):
        return CoreDemand(index.core, group.block_size, group.groups_take)
    return PromptDemand(group.block_size, group.groups_take)


def new_meter(index: BlockIndex, config: VllmConfig) -> PrefillMeter:
    meter = PrefillMeter.of(config)
    return CoreMeter(index.core, meter.behind) if isinstance(index, CoreIndex) else meter


class CoreSteps:
    """Takes an engine's steps with the compiled core. ``step`` takes one step and returns 0 if
    nothing is left to do, else what ``finish`` must do (see ``Core.step``). ``core.taken`` counts
    the blocks evicted in it.
    """

    def __init__(
        self,
        index: CoreIndex,
        client: Mailbox,
        feed: ChangeFeed,
        observer: EngineObserver,
        arranger: FreeQueueArranger,
        news: UrgentFlush,
        demand: CoreDemand,
        meter: CoreMeter,
        arrange: Callable[[EvictionRanking | None], None],
        emit: Callable[[Any], None],
        groups_take: int,
        clock: Clock,
    ) -> None:
        self.core, self._index, self._client, self._feed = index.core, index, client, feed
        self._observer, self._arranger, self._news = observer, arranger, news
        self._demand, self._arrange = demand, arrange
        self._holding: Holding | None = None
        self.core.pace(
            clock, observer.running, observer.sessions, emit, client, client.max_stale_s,
            meter.behind, LEAST_TOKENS, SHARE, LONGEST_S, groups_take,
        )  # fmt: skip
        self.core.tell_at = news.due_at
        self.step = self.core.step

    def watch(self, holding: Holding) -> None:
        """Call ``holding`` in each step in which it has work to do."""
        core, self._holding = self.core, holding
        holding.rested_at = lambda: core.rested_at
        core.watch_holding(holding)

    def finish(self, due: int, tokens: int, fetched: int = 0) -> None:
        """Do the work that is ``due`` after the core's part of a step of ``tokens`` tokens."""
        arranger, client = self._arranger, self._client
        if due & _TAKE:
            arranger.step_ended(self._feed.take())
            arranger.expect(*self._demand.most(len(self._observer.running), fetched))
            due |= ARRANGE
        elif due & _BEHIND:
            self._index.taken()
        if due & (_TAKE | _TELL):
            self._news.after_step(self._feed.stored)
            self.core.tell_at = self._news.due_at
        if due & ARRANGE and not arranger.rests(ranking := client.ranking()):
            self._arrange(ranking)
        if due & _HOLD and self._holding is not None:
            self._holding.step(tokens)
