"""The live router before simulated engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from ...fleet.engine_board import EngineBoard, Speed
from ...fleet.fleet_router import FleetRouter, Holdings, Wanted
from ...fleet.pool_shadows import Link, PoolShadows
from ..engine.instance import HostTier, Instance
from ..engine.simulator import Router
from ..traces.trace import Trace
from .prefill_queues import PrefillQueues

_ALL_LOST: Final = np.ones(1, dtype=np.bool_)


class NotingRouter:
    """Asks another router, and remembers where it sent each request.

    Attributes:
        where: Engine numbers, by request.
    """

    def __init__(self, router: Router) -> None:
        self._router = router
        self.where: list[int] = []

    def __call__(self, request: int, instances: Sequence[Instance]) -> int:
        self.where.append(self._router(request, instances))
        return self.where[-1]


class FleetRouting:
    """Asks a ``FleetRouter``, which sees what the simulated engines hold.

    Args:
        store: A tier that all engines share, if they do.
        tokens_per_s: Prompt tokens that an engine computes per second: what it has not computed yet
            waits there. None: prompts take no time, and no queue stands before any engine.
    """

    def __init__(
        self, trace: Trace, store: HostTier | None = None, tokens_per_s: float | None = None
    ) -> None:
        self._chains = trace.chains()
        self._limits = trace.matchable.tolist()
        self._tokens, self._session = trace.input_tokens.tolist(), trace.session.tolist()
        self._at, self._size = trace.at.tolist(), trace.block_size
        self._store = store
        self._speed = Speed()
        self.router = FleetRouter(EngineBoard())
        self.queues: PrefillQueues | None = None
        if tokens_per_s is not None:
            self._speed = replace(self._speed, prefill_tokens_per_s=tokens_per_s)
            self.queues = PrefillQueues(tokens_per_s, self.router.computed)

    def __call__(self, request: int, instances: Sequence[Instance]) -> int:
        board = self.router.board
        for instance in instances[len(board) :]:
            pool_tokens = instance.capacity * self._size
            board.add(f"#{len(board)}", replace(self._speed, pool_tokens=pool_tokens))
        now = self._at[request]
        if self.queues is not None:
            self.queues.advance(now)
        wanted = Wanted(self._session[request], self._tokens[request])
        choice = self.router.route(wanted, self._holdings(request, instances), now)
        if self.queues is None:
            self.router.computed(choice)
        else:
            self.queues.add(choice, now)
        return choice.engine

    def _holdings(self, request: int, instances: Sequence[Instance]) -> Holdings:
        chain, limit = self._chains[request], self._limits[request]

        def reached(reach: Callable[[Instance], int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
            return self._size * np.array([reach(each) for each in instances], dtype=np.int64)

        pool = reached(lambda instance: instance.match(chain, limit))
        below = reached(lambda instance: instance.reach(chain, limit))
        if self._store is None:
            return Holdings(pool, below, lost=_ALL_LOST)
        return Holdings(pool, pool, int(below.max()), _ALL_LOST)


class MemoryRouting(FleetRouting):
    """The same router where engines have no graph: it goes by shadows of their pools, as the proxy
    does."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self._pools = PoolShadows()

    def __call__(self, request: int, instances: Sequence[Instance]) -> int:
        engine = super().__call__(request, instances)
        chain = self._links(self._chains[request])
        self._pools.sent(chain, engine, int(self.router.board.pool[engine]))
        return engine

    def _holdings(self, request: int, instances: Sequence[Instance]) -> Holdings:
        chain = self._links(self._chains[request][: self._limits[request]])
        return self._pools.holdings(chain, len(instances))

    def _links(self, chain: Sequence[int]) -> list[Link]:
        return [Link(block, self._size * at) for at, block in enumerate(chain, start=1)]
