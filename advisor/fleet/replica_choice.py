"""``ReplicaChoice``: routes requests over named replicas that come and go."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from .board import EngineBoard, Speed
from .callers import Callers, Turn
from .pools import PoolShadows
from .router import OVERLOAD, Choice, FleetRouter, Reason, RoutingRequest

_MOST_RUNNING: Final = 100_000  # requests tracked until they end; chosen


class ReplicaChoice:
    """A ``FleetRouter`` over replicas that come and go. A removed replica keeps its number and
    counts as an engine that is down, so each decision skips it.
    """

    def __init__(self, overload: float = OVERLOAD, speed: Speed | None = None) -> None:
        self._speed = speed
        self.router = FleetRouter(EngineBoard(), overload)
        self._pools = PoolShadows()
        self._callers = Callers()
        self._numbers: dict[str, int] = {}
        self._chosen: OrderedDict[str, tuple[Turn, RoutingRequest, Choice]] = OrderedDict()
        self._running: OrderedDict[str, Choice] = OrderedDict()

    def present(self, replicas: Sequence[str]) -> None:
        """Mark these replicas up and all others down."""
        board = self.router.board
        for replica in replicas:
            if replica not in self._numbers:
                self._numbers[replica] = board.add(replica, self._speed)
        were_up = board.up.copy()
        board.up[:] = False
        board.up[[self._numbers[replica] for replica in replicas]] = True
        for gone in np.flatnonzero(were_up & ~board.up):
            self._pools.forget(int(gone))

    def choose(
        self,
        request: str,  # its id, for `routed` and `completed`
        body: Mapping[str, Any],  # of an OpenAI-compatible request
        replicas: Sequence[str],  # those that may be chosen
        session: str = "",  # as the caller's header names it; empty: it does not
    ) -> list[str]:
        """Return ``replicas``, the chosen one first and the others by cost; the choice is kept
        until ``routed``.
        """
        turn = self._callers.turn(body, [], session)
        board = self.router.board
        holdings = self._pools.holdings(turn.prompt.links, len(board))
        wanted = RoutingRequest(turn.session, max(1, turn.prompt.tokens))
        choice = self.router.choose(wanted, holdings)
        self._chosen[request] = (turn, wanted, choice)
        if len(self._chosen) > _MOST_RUNNING:
            self._chosen.popitem(last=False)  # it never went anywhere
        costs = self.router.costs(wanted, holdings)
        others = sorted(replicas, key=lambda replica: costs[self._numbers[replica]])
        chosen = board.names[choice.engine]
        return sorted(others, key=lambda replica: replica != chosen)

    def routed(self, request: str, replica: str, now: float) -> None:
        """Note which replica a request went to, which may differ from the chosen one."""
        if (found := self._chosen.pop(request, None)) is None:
            return
        turn, wanted, choice = found
        went = self._numbers.get(replica, choice.engine)
        if went != choice.engine:  # the chosen one had too many requests
            reason = Reason.HOME_OVERLOADED if choice.reason is Reason.HOME else choice.reason
            choice = choice._replace(engine=went, reason=reason)
        self.router.take(choice, wanted, now)
        pool_tokens = int(self.router.board.pool[choice.engine])
        self._pools.sent(turn.prompt.links, choice.engine, pool_tokens)
        self._callers.sent(turn)
        if turn.ends:
            self.router.homes.forget(turn.session)
        self._running[request] = choice
        if len(self._running) > _MOST_RUNNING:
            self.router.computed(self._running.popitem(last=False)[1])

    def completed(self, request: str) -> None:
        if (choice := self._running.pop(request, None)) is not None:
            self.router.computed(choice)
